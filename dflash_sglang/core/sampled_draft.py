"""Drawing drafts from the drafter's most likely tokens, for rules that accept sampled drafts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from dflash_kernels.block_verify import draw
from dflash_kernels.types import Proposal
from torch import Tensor


class Candidates(NamedTuple):
    """The drafter's K most likely tokens at every position after the anchor."""

    ids: Tensor  # [bs, width - 1, K] int64, most likely first
    logits: Tensor  # [bs, width - 1, K] float32


class SampledDraft(NamedTuple):
    """Drafts and what they were drawn from."""

    ids: Tensor  # [bs, width - 1] int64
    proposal: Proposal


def sample_drafts(
    candidates: Candidates, temperature: float, uniforms: Tensor, greedy: Tensor
) -> SampledDraft:
    """Draw every position on its own; a greedy request gets the most likely token.

    Positions are independent given the context, so the proposal of a position is its own softmax,
    whatever was drawn before it.

    Args:
        candidates: what to draw from.
        temperature: above 0.
        uniforms: [bs, width - 1] float32 in [0, 1).
        greedy: [bs] bool.

    Returns:
        The drafts, with q over the K candidates.
    """
    bs, drafts, top_k = candidates.ids.shape
    probs = torch.softmax(candidates.logits / temperature, dim=-1)
    choice = draw(probs.reshape(-1, top_k), uniforms.reshape(-1)).view(bs, drafts, 1)
    choice = choice.masked_fill(greedy.view(bs, 1, 1), 0)
    ids = candidates.ids.gather(2, choice).squeeze(2)
    return SampledDraft(ids, Proposal(candidates.ids, probs))
