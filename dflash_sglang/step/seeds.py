"""Seeded draws that do not depend on the other requests of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.sampler import sampling_from_probs_torch
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from torch import Tensor


def draw_unfiltered_alone(
    original: Callable[..., Any],
    probs: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    need_min_p_sampling: bool,
    sampling_seed: Tensor | None,
    positions: Tensor,
    **options: Any,
) -> Any:
    """AROUND hook on the torch sampler: a request without filters draws as if it were alone.

    A seed is hashed with the column of a token, and the sampler sorts the columns as soon as one
    request of the batch filters. Alone, an unfiltered request is drawn over unsorted columns; so it
    is here.

    Args:
        original: SGLang's sampler.
        probs: [n, vocab] float32.
        top_ks: [n] int32.
        top_ps: [n] float32.
        min_ps: [n] float32.
        need_min_p_sampling: whether a request has min-p; never with a seed.
        sampling_seed: [n] int64, None without --enable-deterministic-inference.
        positions: [n] int64.
        options: passed on.

    Source: sglang/srt/layers/sampler.py:Sampler._sample_from_probs.
    """
    filtered = original(
        probs, top_ks, top_ps, min_ps, need_min_p_sampling, sampling_seed, positions, **options
    )
    if sampling_seed is None or options.get("return_filtered_probs"):
        return filtered
    alone = sampling_from_probs_torch(probs, sampling_seed=sampling_seed, positions=positions)
    unfiltered = (top_ks == TOP_K_ALL) & (top_ps == 1.0)
    return torch.where(unfiltered, alone, filtered)
