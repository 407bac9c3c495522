"""The definition of `verify_bound`, in a plain loop on the host.

It reads its arguments from the device, so it is no form for a captured graph: where torch serves on
CUDA (`dispatch.use_reference`), nothing is bounded. For some 15 numbers on a CPU a loop is faster
than a dozen torch calls.
"""

from math import exp, inf, isnan

import torch
from torch import Tensor

# Finer towards 1, where most drafts lie and where a block of 15 tells .99 from .999.
EDGES = (0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
CLASSES = len(EDGES) + 1


def verify_bound(values: Tensor, lse: Tensor, acceptance: Tensor, prices: Tensor) -> Tensor:
    """Reference of `dflash_kernels.verify_bound.verify_bound`."""
    accepted, price = acceptance.tolist(), prices.tolist()
    classes = [class_of(*one) for one in zip(values.tolist(), lse.tolist(), strict=True)]
    best, drafts, expected, survival = -price[0], 0, 0.0, 1.0
    for verified, chosen in enumerate(classes, start=1):
        survival *= accepted[chosen]
        expected += survival
        if expected - price[verified] >= best:  # the last of equals
            best, drafts = expected - price[verified], verified
    return torch.tensor([drafts + 1, drafts, *classes], dtype=torch.int32, device=values.device)


def class_of(value: float, lse: float) -> int:
    """Class of a drafted position's largest logit; 0 without a finite one."""
    distance = value - lse
    if isnan(distance) or distance == -inf:
        return 0
    confidence = exp(min(distance, 0.0))
    return sum(edge <= confidence for edge in EDGES)
