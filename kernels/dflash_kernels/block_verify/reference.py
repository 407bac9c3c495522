"""Torch form of `block_verify`; runs on every device."""

from typing import NamedTuple

import torch
from torch import Tensor

from dflash_kernels.accept_match import Acceptance


class Proposal(NamedTuple):
    """What sampled drafts were drawn from: per position, K tokens and their probabilities."""

    top_ids: Tensor  # [bs, width - 1, K] int64, distinct within a position
    top_probs: Tensor  # [bs, width - 1, K] float32, sums to 1 over K


def block_verify(
    draft_ids: Tensor,
    proposal: Proposal,
    target_probs: Tensor,
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

    Args:
        draft_ids: [bs, width] int64, column 0 the anchor.
        proposal: what columns 1 .. width-1 were drawn from.
        target_probs: [bs, width, vocab] float32, p; rows sum to 1.
        uniforms: [bs, width] float32 in [0, 1); column i - 1 is u_i, the last one draws the bonus.
        prefix_lens: [bs] int64, tokens in the KV cache before the verify.
        limit: [bs] int32, most drafts a request may accept (n); None for all.

    Returns:
        The acceptance. Columns of `output_ids` past `commit_len` are the bonus.

    Source: Sun et al., Block Verification Accelerates Speculative Decoding (arXiv 2403.10444),
        Algorithm 2.
    """
    last = last_draft(draft_ids, limit)
    ratios = running_ratios(draft_ids, proposal, target_probs)
    keep = keep_probs(ratios, proposal, target_probs, last)
    position = torch.arange(1, draft_ids.shape[1], device=draft_ids.device)
    accepted = (uniforms[:, :-1] < keep) & (position <= last[:, None])
    accept_len = torch.nn.functional.pad(accepted * position, (1, 0)).amax(dim=1)
    ratio = ratios.gather(1, accept_len[:, None]).squeeze(1)
    weights = bonus_weights(proposal, target_probs, accept_len, ratio, last)
    return commit(draft_ids, accept_len, draw(weights, uniforms[:, -1]), prefix_lens)


def last_draft(draft_ids: Tensor, limit: Tensor | None) -> Tensor:
    """Most drafts each request may accept, [bs] int64."""
    bs, width = draft_ids.shape
    if limit is None:
        return draft_ids.new_full((bs,), width - 1)
    return limit.to(torch.int64).clamp(max=width - 1)


def running_ratios(draft_ids: Tensor, proposal: Proposal, target_probs: Tensor) -> Tensor:
    """r_0 .. r_{width-1}, [bs, width]; arguments as in `block_verify`."""
    drawn_from = proposed_probs(draft_ids, proposal)
    wanted = target_probs[:, :-1].gather(2, draft_ids[:, 1:, None]).squeeze(2)
    ratios = [torch.ones_like(target_probs[:, 0, 0])]
    for ratio in (wanted / drawn_from).unbind(dim=1):
        ratios.append((ratios[-1] * ratio).clamp(max=1))
    return torch.stack(ratios, dim=1)


def keep_probs(ratios: Tensor, proposal: Proposal, target_probs: Tensor, last: Tensor) -> Tensor:
    """h_1 .. h_{width-1}: how likely a run ends at each draft, unless it ends further on.

    Args:
        ratios: [bs, width], r.
        proposal: as in `block_verify`.
        target_probs: [bs, width, vocab], p.
        last: [bs] int64, n.

    Returns:
        [bs, width - 1]; without meaning past column n - 1.
    """
    wanted = target_probs[:, :-1].gather(2, proposal.top_ids)  # [bs, width - 1, K]
    elsewhere = (1 - wanted.sum(dim=2)).clamp(min=0)
    above = (ratios[:, :-1, None] * wanted - proposal.top_probs).clamp(min=0).sum(dim=2)
    surplus = ratios[:, :-1] * elsewhere + above  # s_0 .. s_{width-2}
    lost = surplus + 1 - ratios[:, :-1]
    # 0 / 0 where p equals q: nothing is lost by going on.
    inner = torch.where(lost > 0, surplus / lost, 1.0)
    position = torch.arange(1, ratios.shape[1], device=ratios.device)
    following = torch.nn.functional.pad(inner[:, 1:], (0, 1))  # the last column is always h_n
    return torch.where(position == last[:, None], ratios[:, 1:], following)


def proposed_probs(draft_ids: Tensor, proposal: Proposal) -> Tensor:
    """Probability with which each draft was drawn, [bs, width - 1] float32."""
    drawn = proposal.top_ids == draft_ids[:, 1:, None]
    return (proposal.top_probs * drawn).sum(dim=-1)


def bonus_weights(
    proposal: Proposal, target_probs: Tensor, accept_len: Tensor, ratio: Tensor, last: Tensor
) -> Tensor:
    """Weights of the token after the accepted drafts, [bs, vocab].

    Args:
        proposal: as in `block_verify`.
        target_probs: [bs, width, vocab], p.
        accept_len: [bs] int64.
        ratio: [bs], factor of the verifier's distribution in the residual.
        last: [bs] int64; a request that accepted so many has no proposal to subtract.
    """
    row = torch.arange(len(accept_len), device=accept_len.device)
    target = target_probs[row, accept_len]
    if proposal.top_ids.shape[1] == 0:
        return target
    following = accept_len.clamp(max=proposal.top_ids.shape[1] - 1)
    residual = (ratio[:, None] * target).scatter_add(
        1, proposal.top_ids[row, following], -proposal.top_probs[row, following]
    )
    residual = residual.clamp_(min=0)
    # A residual without mass was rejected by rounding alone.
    whole = (accept_len == last) | (residual.sum(dim=1) <= 0)
    return torch.where(whole[:, None], target, residual)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Token at a quantile: the first whose cumulative weight exceeds u times the sum.

    Args:
        weights: [n, vocab] float32, not negative, not all zero; need not sum to 1.
        uniforms: [n] float32 in [0, 1).

    Returns:
        [n] int64; never a token without weight.
    """
    # float64: a float32 running sum over a large vocabulary drops small weights.
    cumulative = weights.to(torch.float64).cumsum(dim=1)
    threshold = uniforms.to(torch.float64)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(1)


def commit(
    draft_ids: Tensor, accept_len: Tensor, bonus_ids: Tensor, prefix_lens: Tensor
) -> Acceptance:
    """The acceptance that keeps the first `accept_len` drafts and then the bonus.

    Args:
        draft_ids: [bs, width] int64, column 0 the anchor.
        accept_len: [bs] int64.
        bonus_ids: [bs] int64.
        prefix_lens: [bs] int64.
    """
    position = torch.arange(draft_ids.shape[1], device=draft_ids.device)
    following = draft_ids.roll(-1, dims=1)  # the last column is never accepted as a draft
    output_ids = torch.where(position < accept_len[:, None], following, bonus_ids[:, None])
    commit_len = accept_len.to(torch.int32) + 1
    return Acceptance(
        accept_len=accept_len.to(torch.int32),
        commit_len=commit_len,
        bonus_ids=bonus_ids,
        output_ids=output_ids,
        new_seq_lens=prefix_lens + commit_len,
    )
