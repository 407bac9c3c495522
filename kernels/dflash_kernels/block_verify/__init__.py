"""Accept sampled drafts, as a block or one by one, and draw the token after them."""

import torch
from torch import Tensor

from dflash_kernels.block_verify import reference
from dflash_kernels.block_verify.reference import (
    bonus_weights,
    commit,
    draw,
    keep_probs,
    last_draft,
    proposed_probs,
    running_ratios,
)
from dflash_kernels.dispatch import runs_triton
from dflash_kernels.types import Acceptance, Proposal

__all__ = [
    "block_verify",
    "bonus_weights",
    "commit",
    "draw",
    "keep_probs",
    "last_draft",
    "proposed_probs",
    "running_ratios",
    "token_wise",
]


def block_verify(
    draft_ids: Tensor,
    proposal: Proposal,
    verifier_probs: Tensor,
    uniforms: Tensor,
    prefix_lens: Tensor,
    *,
    limit: Tensor | None = None,
) -> Acceptance:
    r"""Accept as much of a sampled block as keeps the verifier's distribution, and one token more.

    With x_1 .. x_n the drafts a request may accept, q_i the proposal of x_i and p_i the verifier's
    distribution after x_1 .. x_i:

        r_0 = 1,  r_i = min(1, r_{i-1} p_{i-1}(x_i) / q_i(x_i))
        s_i = sum_v max(r_i p_i(v) - q_{i+1}(v), 0)
        h_i = s_i / (s_i + 1 - r_i) for i < n,  h_n = r_n
        accept_len = max { i : u_i < h_i }, 0 if there is none

    and the bonus is drawn from p_n when all n are accepted, else with weight
    max(r_i p_i - q_{i+1}, 0) at i = accept_len. The drafts of a block are independent given its
    context, so q_i(x_i) is the conditional proposal. Of a [V] row only p at the K proposed tokens
    is needed to accept: s_i = r_i (1 - p_i(K)) + sum_K max(r_i p_i - q_{i+1}, 0).

    Three launches: one reads K probabilities a position, two read one row of p a request.

    Args:
        draft_ids: [bs, width] int64, column 0 the anchor.
        proposal: what columns 1 .. width-1 were drawn from.
        verifier_probs: [bs, width, vocab] float32, p; adjacent columns, rows sum to 1.
        uniforms: [bs, width] float32 in [0, 1); column i - 1 is u_i, the last one draws the bonus.
        prefix_lens: [bs] int64, tokens in the KV cache before the verify.
        limit: [bs] int32, most drafts a request may accept (n); None for all.

    Returns:
        The acceptance. Columns of `output_ids` past `commit_len` are the bonus.

    Source: Sun et al., Block Verification Accelerates Speculative Decoding (arXiv 2403.10444),
        Algorithm 2.
    """
    if runs_triton(draft_ids):
        given = (draft_ids, *proposal, verifier_probs, uniforms, prefix_lens, limit)
        return Acceptance(*_block_verify(*given, True))
    return reference.block_verify(
        draft_ids, proposal, verifier_probs, uniforms, prefix_lens, limit=limit
    )


def token_wise(
    draft_ids: Tensor,
    proposal: Proposal,
    verifier_probs: Tensor,
    uniforms: Tensor,
    prefix_lens: Tensor,
    *,
    limit: Tensor | None = None,
) -> Acceptance:
    """Accept each sampled draft with probability min(1, p / q), up to the first that is not.

    Arguments and result are those of `block_verify`, which accepts at least as much on average, and
    so are the launches.

    Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding
        (arXiv 2211.17192), Algorithm 1.
    """
    if runs_triton(draft_ids):
        given = (draft_ids, *proposal, verifier_probs, uniforms, prefix_lens, limit)
        return Acceptance(*_block_verify(*given, False))
    return reference.token_wise(
        draft_ids, proposal, verifier_probs, uniforms, prefix_lens, limit=limit
    )


@torch.library.custom_op("dflash::block_verify", mutates_args=())
def _block_verify(
    draft_ids: Tensor,
    top_ids: Tensor,
    top_probs: Tensor,
    verifier_probs: Tensor,
    uniforms: Tensor,
    prefix_lens: Tensor,
    limit: Tensor | None,
    as_block: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from dflash_kernels.block_verify import kernel

    rule = kernel.block_verify if as_block else kernel.token_wise
    proposal = Proposal(top_ids, top_probs)
    return rule(draft_ids, proposal, verifier_probs, uniforms, prefix_lens, limit=limit)


@_block_verify.register_fake
def _(
    draft_ids: Tensor,
    top_ids: Tensor,
    top_probs: Tensor,
    verifier_probs: Tensor,
    uniforms: Tensor,
    prefix_lens: Tensor,
    limit: Tensor | None,
    as_block: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return Acceptance.empty(draft_ids, prefix_lens)
