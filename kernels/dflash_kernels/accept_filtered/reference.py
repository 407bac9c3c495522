"""Torch form of `accept_filtered`; runs on every device."""

import torch
from torch import Tensor

from dflash_kernels.accept_match.reference import accept_match
from dflash_kernels.accept_sampled.reference import noisy_scores
from dflash_kernels.types import Acceptance, Filters


def accept_filtered(
    logits: Tensor,
    draft_ids: Tensor,
    prefix_lens: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    filters: Filters,
    *,
    limit: Tensor | None = None,
) -> Acceptance:
    """Reference of `dflash_kernels.accept_filtered.accept_filtered`."""
    scaled, scores = noisy_scores(logits, draft_ids, prefix_lens, temperatures, seeds)
    allowed = kept(scaled, filters) | (temperatures == 0)[:, None, None]
    return accept_match(
        draft_ids, scores.where(allowed, -torch.inf).argmax(dim=-1), prefix_lens, limit=limit
    )


def kept(scaled: Tensor, filters: Filters) -> Tensor:
    """Tokens that pass the filters, [bs, width, V] bool.

    Args:
        scaled: [bs, width, V] float32, logits over the temperature.
        filters: of every request.
    """
    top_ks, top_ps, min_ps = (values[:, None, None] for values in filters)
    ordered, order = scaled.double().sort(dim=-1, descending=True)
    weights = (ordered - ordered[..., :1]).nan_to_num(nan=0.0).exp()  # of the likeliest: 1
    before = weights.cumsum(dim=-1) - weights
    rank = torch.arange(scaled.shape[-1], device=scaled.device)
    # Of equal values all have what lies before the first of them.
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    rank = torch.where(first, rank, -1).cummax(dim=-1).values
    before = torch.where(first, before, -1.0).cummax(dim=-1).values
    passes = rank < top_ks
    passes &= (before < top_ps * weights.sum(dim=-1, keepdim=True)) | (top_ps >= 1)
    passes &= weights >= min_ps
    return torch.zeros_like(passes).scatter_(-1, order, passes)
