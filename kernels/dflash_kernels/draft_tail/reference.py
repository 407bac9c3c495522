"""Torch form of `draft_tail`; runs on every device."""

from typing import NamedTuple

import torch
from torch import Tensor


class Tail(NamedTuple):
    """What the drafter says of each position, most likely token first."""

    ids: Tensor  # [rows, top] int64
    values: Tensor  # [rows, top] float32, their logits
    lse: Tensor  # [rows] float32, log of the sum of exp over the valid columns

    @property
    def probs(self) -> Tensor:
        """[rows, top] float32, the drafter's probability of each id."""
        return torch.exp(self.values - self.lse[:, None])


def draft_tail(logits: Tensor, *, num_ids: int, top: int = 1) -> Tail:
    """Reference of `dflash_kernels.draft_tail.draft_tail`."""
    x = logits[:, :num_ids].to(torch.float32)
    x = torch.where(x.isnan(), -torch.inf, x)
    if top == 1:
        values, ids = x.max(dim=1, keepdim=True)
    else:
        # Stable: torch.topk leaves the order of equal values open.
        values, ids = x.sort(dim=1, descending=True, stable=True)
    # Copies, as the sorted rows are as wide as the vocabulary.
    return Tail(ids[:, :top].clone(), values[:, :top].clone(), x.logsumexp(dim=1))
