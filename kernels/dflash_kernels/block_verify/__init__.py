"""Accept sampled drafts, as a block or one by one, and draw the token after them."""

from torch import Tensor

from dflash_kernels.block_verify import reference
from dflash_kernels.block_verify.reference import draw
from dflash_kernels.dispatch import check_shape, runs_triton
from dflash_kernels.types import Acceptance, Proposal

__all__ = ["block_verify", "draw", "token_wise"]


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

    and the bonus token is drawn from p_n when all n are accepted, else with weight
    max(r_i p_i - q_{i+1}, 0) at i = accept_len. The drafts of a block are independent given its
    context, so q_i(x_i) is the conditional proposal. Of a [V] row only p at the K proposed tokens
    is needed to accept: s_i = r_i (1 - p_i(K)) + sum_K max(r_i p_i - q_{i+1}, 0).

    Three launches: one reads K probabilities a position, two read one row of p a request.

    Args:
        draft_ids: [bs, width] int64, column 0 the anchor.
        proposal: what columns 1 .. width-1 were drawn from.
        verifier_probs: [bs, width, V] float32, p; adjacent columns, rows sum to 1.
        uniforms: [bs, width] float32 in [0, 1); column i - 1 is u_i, the last one draws the bonus.
        prefix_lens: [bs] int64, tokens in the KV cache before the verify.
        limit: [bs] int32, most drafts a request may accept (n); None for all.

    Returns:
        The acceptance. Columns of `output_ids` past `commit_len` are the bonus token.

    Raises:
        ValueError: shapes do not fit each other.

    Source: Sun et al., Block Verification Accelerates Speculative Decoding (arXiv 2403.10444),
        Algorithm 2.
    """
    _check(draft_ids, proposal, verifier_probs, uniforms, prefix_lens, limit)
    if not runs_triton(draft_ids):
        return reference.block_verify(
            draft_ids, proposal, verifier_probs, uniforms, prefix_lens, limit=limit
        )
    return _on_cuda(draft_ids, proposal, verifier_probs, uniforms, prefix_lens, limit, True)


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

    Arguments, result, errors and launches are those of `block_verify`, which accepts at least as
    much on average.

    Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding
        (arXiv 2211.17192), Algorithm 1.
    """
    _check(draft_ids, proposal, verifier_probs, uniforms, prefix_lens, limit)
    if not runs_triton(draft_ids):
        return reference.token_wise(
            draft_ids, proposal, verifier_probs, uniforms, prefix_lens, limit=limit
        )
    return _on_cuda(draft_ids, proposal, verifier_probs, uniforms, prefix_lens, limit, False)


def _check(
    draft_ids: Tensor,
    proposal: Proposal,
    verifier_probs: Tensor,
    uniforms: Tensor,
    prefix_lens: Tensor,
    limit: Tensor | None,
) -> None:
    (bs, width), top = draft_ids.shape, proposal.top_ids.shape[-1]
    check_shape("top_ids", proposal.top_ids, bs, width - 1, top)
    check_shape("top_probs", proposal.top_probs, bs, width - 1, top)
    check_shape("verifier_probs", verifier_probs, bs, width, verifier_probs.shape[-1])
    check_shape("uniforms", uniforms, bs, width)
    check_shape("prefix_lens", prefix_lens, bs)
    check_shape("limit", limit, bs)


def _on_cuda(
    draft_ids: Tensor,
    proposal: Proposal,
    verifier_probs: Tensor,
    uniforms: Tensor,
    prefix_lens: Tensor,
    limit: Tensor | None,
    as_block: bool,
) -> Acceptance:
    from dflash_kernels.block_verify import kernel

    given = (draft_ids, *proposal, verifier_probs, uniforms, prefix_lens, limit)
    return Acceptance(*kernel.block_verify_op(*given, as_block))
