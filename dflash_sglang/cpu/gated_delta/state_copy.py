"""Replacements of SGLang's kernels that copy states between pools, for all layers at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def fused_conv_window_scatter_with_mask(
    dst: Tensor,
    src: Tensor,
    dst_indices_raw: Tensor,
    step_indices_raw: Tensor,
    src_indices_raw: Tensor | None = None,
) -> None:
    """Copy the snapshot after one token of each request to a state slot.

    Args:
        dst: [layers, slots, *state], written.
        src: [layers, rows, block, *state].
        dst_indices_raw: [requests] int, state slots; negative for none.
        step_indices_raw: [requests] int, the token; negative for none.
        src_indices_raw: [requests] int, rows; request i has row i by default.
    """
    chosen = torch.nonzero((step_indices_raw >= 0) & (dst_indices_raw >= 0)).flatten()
    rows = chosen if src_indices_raw is None else src_indices_raw[chosen].long()
    dst[:, dst_indices_raw[chosen].long()] = src[:, rows, step_indices_raw[chosen].long()].to(
        dst.dtype
    )


def scatter_mamba_states_after_mtp_verify(
    mamba_caches: Any,
    state_indices_tensor: Tensor,
    last_correct_step_indices: Tensor,
    mamba_track_indices: Tensor | None,
    mamba_steps_to_track: Tensor | None,
    src_indices_raw: Tensor | None = None,
) -> None:
    """Commit with snapshots: copy the states after the committed tokens into the pools.

    Args:
        mamba_caches: SGLang's pools and the snapshots of a verify.
        state_indices_tensor: [requests] int, state slots.
        last_correct_step_indices: [requests] int, the last committed token.
        mamba_track_indices: [requests] int, state slots of the prefix cache.
        mamba_steps_to_track: [requests] int, the token whose state is copied there; negative for
            none.
        src_indices_raw: [requests] int, rows of the snapshots.
    """
    pairs = [(mamba_caches.temporal, mamba_caches.intermediate_ssm)]
    pairs += zip(mamba_caches.conv, mamba_caches.intermediate_conv_window, strict=True)
    for pool, snapshots in pairs:
        fused_conv_window_scatter_with_mask(
            pool, snapshots, state_indices_tensor, last_correct_step_indices, src_indices_raw
        )
        if mamba_track_indices is not None and mamba_steps_to_track is not None:
            fused_conv_window_scatter_with_mask(
                pool, snapshots, mamba_track_indices, mamba_steps_to_track, src_indices_raw
            )


def track_mamba_states_all_layers(
    conv_states_pool: Tensor,
    ssm_states_pool: Tensor,
    cache_indices: Tensor,
    mamba_track_mask: Tensor,
    mamba_track_indices: Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Plain decoding: copy states at a tracking boundary for the prefix cache.

    Args:
        conv_states_pool: [layers, slots, channels, kernel_size - 1].
        ssm_states_pool: [layers, slots, heads, V, K].
        cache_indices: [requests] int, state slots.
        mamba_track_mask: [requests] bool, whether a request is at a boundary.
        mamba_track_indices: [requests] int, state slots to copy to; negative for none.
        batch_size: number of requests.
        check_freed_slots: unused; negative slots are always skipped.
    """
    to = mamba_track_indices[:batch_size]
    chosen = torch.nonzero(mamba_track_mask[:batch_size].bool() & (to >= 0)).flatten()
    source, target = cache_indices[chosen].long(), to[chosen].long()
    for pool in (conv_states_pool, ssm_states_pool):
        pool[:, target] = pool[:, source]


def track_mamba_states_if_needed(
    conv_states: Tensor, ssm_states: Tensor, *args: Any, **kwargs: Any
) -> None:
    """``track_mamba_states_all_layers`` for one layer."""
    track_mamba_states_all_layers(
        conv_states.unsqueeze(0), ssm_states.unsqueeze(0), *args, **kwargs
    )
