"""Torch form of `verify_bound`; runs on every device."""

import torch
from torch import Tensor

# Finer towards 1, where most drafts lie and where a block of 15 tells .99 from .999.
EDGES = (0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
CLASSES = len(EDGES) + 1


def verify_bound(values: Tensor, lse: Tensor, acceptance: Tensor, prices: Tensor) -> Tensor:
    """Reference of `dflash_kernels.verify_bound.verify_bound`."""
    confidence = (values - lse).exp()
    edges = torch.tensor(EDGES, dtype=torch.float32, device=values.device)
    classes = (confidence[:, None] >= edges).sum(1)  # NaN is not above any edge
    survival = acceptance[classes].cumprod(0)
    worth = torch.cat([survival.new_zeros(1), survival.cumsum(0)]) - prices
    drafts = worth.numel() - 1 - worth.flip(0).argmax()  # the last of equals
    return torch.cat([torch.stack([drafts + 1, drafts]), classes]).to(torch.int32)
