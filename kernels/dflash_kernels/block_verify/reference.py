"""Torch form of `block_verify` and `token_wise`; runs on every device.

Everything that is compared with a uniform number is computed in float64 from the probabilities as
they are. Sums in another order then differ by 1e-16 and not by 1e-7, so that another implementation
decides alike.
"""

import torch
from torch import Tensor

from dflash_kernels.types import Acceptance, Proposal


def block_verify(
    draft_ids: Tensor,
    proposal: Proposal,
    verifier_probs: Tensor,
    uniforms: Tensor,
    prefix_lens: Tensor,
    *,
    limit: Tensor | None = None,
) -> Acceptance:
    """Reference of `dflash_kernels.block_verify.block_verify`."""
    last = last_draft(draft_ids, limit)
    ratios = running_ratios(draft_ids, proposal, verifier_probs)
    keep = keep_probs(ratios, proposal, verifier_probs, last)
    position = torch.arange(1, draft_ids.shape[1], device=draft_ids.device)
    accepted = (uniforms[:, :-1] < keep) & (position <= last[:, None])
    accept_len = torch.nn.functional.pad(accepted * position, (1, 0)).amax(dim=1)
    ratio = ratios.gather(1, accept_len[:, None]).squeeze(1)
    weights = bonus_weights(proposal, verifier_probs, accept_len, ratio, last)
    return commit(draft_ids, accept_len, draw(weights, uniforms[:, -1]), prefix_lens)


def token_wise(
    draft_ids: Tensor,
    proposal: Proposal,
    verifier_probs: Tensor,
    uniforms: Tensor,
    prefix_lens: Tensor,
    *,
    limit: Tensor | None = None,
) -> Acceptance:
    """Reference of `dflash_kernels.block_verify.token_wise`."""
    drawn_from = proposed_probs(draft_ids, proposal)
    wanted = verifier_probs[:, :-1].gather(2, draft_ids[:, 1:, None]).squeeze(2).double()
    last = last_draft(draft_ids, limit)
    position = torch.arange(draft_ids.shape[1] - 1, device=draft_ids.device)
    accepted = (uniforms[:, :-1] * drawn_from < wanted) & (position < last[:, None])
    accept_len = accepted.to(torch.int64).cumprod(dim=1).sum(dim=1)
    whole = torch.ones_like(verifier_probs[:, 0, 0])
    weights = bonus_weights(proposal, verifier_probs, accept_len, whole, last)
    return commit(draft_ids, accept_len, draw(weights, uniforms[:, -1]), prefix_lens)


def last_draft(draft_ids: Tensor, limit: Tensor | None) -> Tensor:
    """Most drafts each request may accept, [bs] int64."""
    bs, width = draft_ids.shape
    if limit is None:
        return draft_ids.new_full((bs,), width - 1)
    return limit.to(torch.int64).clamp(max=width - 1)


def running_ratios(draft_ids: Tensor, proposal: Proposal, verifier_probs: Tensor) -> Tensor:
    """r_0 .. r_{width-1}, [bs, width] float64; arguments as in `block_verify`."""
    drawn_from = proposed_probs(draft_ids, proposal)
    wanted = verifier_probs[:, :-1].gather(2, draft_ids[:, 1:, None]).squeeze(2)
    ratios = [torch.ones_like(verifier_probs[:, 0, 0], dtype=torch.float64)]
    for ratio in (wanted / drawn_from).unbind(dim=1):
        ratios.append((ratios[-1] * ratio).clamp(max=1))
    return torch.stack(ratios, dim=1)


def keep_probs(ratios: Tensor, proposal: Proposal, verifier_probs: Tensor, last: Tensor) -> Tensor:
    """h_1 .. h_{width-1}: how likely a run ends at each draft, unless it ends further on.

    Args:
        ratios: [bs, width] float64, r.
        proposal: as in `block_verify`.
        verifier_probs: [bs, width, vocab], p.
        last: [bs] int64, n.

    Returns:
        [bs, width - 1] float64; without meaning past column n - 1.
    """
    wanted = verifier_probs[:, :-1].gather(2, proposal.top_ids).double()  # [bs, width - 1, K]
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
    """Probability with which each draft was drawn, [bs, width - 1] float64."""
    drawn = proposal.top_ids == draft_ids[:, 1:, None]
    return (proposal.top_probs.double() * drawn).sum(dim=-1)


def bonus_weights(
    proposal: Proposal, verifier_probs: Tensor, accept_len: Tensor, ratio: Tensor, last: Tensor
) -> Tensor:
    """Weights of the token after the accepted drafts, [bs, vocab] float64.

    Args:
        proposal: as in `block_verify`.
        verifier_probs: [bs, width, vocab], p.
        accept_len: [bs] int64.
        ratio: [bs], factor of the verifier's distribution in the residual.
        last: [bs] int64; a request that accepted so many has no proposal to subtract.
    """
    row = torch.arange(len(accept_len), device=accept_len.device)
    row_probs = verifier_probs[row, accept_len].double()
    if proposal.top_ids.shape[1] == 0:
        return row_probs
    following = accept_len.clamp(max=proposal.top_ids.shape[1] - 1)
    residual = (ratio[:, None] * row_probs).scatter_add(
        1, proposal.top_ids[row, following], -proposal.top_probs[row, following].double()
    )
    residual = residual.clamp_(min=0)
    # A residual without mass was rejected by rounding alone.
    whole = (accept_len == last) | (residual.sum(dim=1) <= 0)
    return torch.where(whole[:, None], row_probs, residual)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Token at a quantile: the first whose cumulative weight exceeds u times the sum.

    Args:
        weights: [n, vocab] floats, not negative, not all zero; need not sum to 1.
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
