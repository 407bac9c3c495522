"""The distribution that the ordinary sampler draws from, for rules that need probabilities."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Filters(NamedTuple):
    """Sampling parameters of n rows."""

    temperatures: Tensor  # [n, 1] float32, above 0
    top_ks: Tensor  # [n] int32; 1 for a greedy row, above the vocabulary for none
    top_ps: Tensor  # [n] float32; 1 is neutral
    min_ps: Tensor  # [n] float32; 0 is neutral
    any_set: bool  # whether top-k, top-p or min-p of any row is not neutral


def verifier_probs(logits: Tensor, filters: Filters) -> Tensor:
    """Probabilities after temperature, top-k, top-p and min-p.

    Top-k and top-p look at the same unfiltered probabilities and a token must satisfy both; min-p
    then compares with the most likely one.

    Args:
        logits: [n, vocab] float32, penalties, masks and bias applied.
        filters: the parameters of every row.

    Returns:
        [n, vocab] float32, new; rows sum to 1.

    Source: the rules and their order are those of
        sglang/srt/layers/sampler.py:top_k_top_p_min_p_sampling_from_probs_torch.
    """
    probs = torch.softmax(logits / filters.temperatures, dim=-1)
    if not filters.any_set:
        return probs
    ordered, ids = probs.sort(dim=-1, descending=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    before = ordered.cumsum(dim=-1) - ordered
    dropped = rank >= filters.top_ks[:, None]
    dropped |= before > filters.top_ps[:, None]
    dropped |= ordered < ordered[:, :1] * filters.min_ps[:, None]
    ordered = ordered.masked_fill_(dropped, 0.0)
    ordered /= ordered.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probs).scatter_(-1, ids, ordered)
