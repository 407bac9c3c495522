"""Replacements of SGLang's replay kernels, with their signatures.

A verify does not change the state; it records (d, k, g) of every token of the block. A commit
applies the records of the committed tokens. SGLang's ring buffer can hold committed tokens for some
steps before they are applied. Our worker has them applied at every commit, so a block is always
recorded from index 0 and the ring's cursors stay at 0: docs/method/recurrent-state.md.
"""

# ruff: noqa: N803 (SGLang names its arguments)

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dflash_sglang.cpu.gated_delta.delta_rule import Updates, apply_updates, run_block
from dflash_sglang.cpu.gated_delta.kernel_args import compute_dtype, equal_blocks, valid_slots


def gdn_replayssm_spec_decode(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    checkpoint_state: Tensor,
    d_cache: Tensor,
    k_cache: Tensor,
    g_cache: Tensor,
    out: Tensor,
    query_start_loc: Tensor,
    ssm_state_indices: Tensor,
    replay_indices: Tensor,
    scale: float | None = None,
    **_: Any,
) -> Tensor:
    """Verify: the outputs of one block per request, and its record.

    Args:
        q: [total, key_heads, K]; ``total`` = requests * block.
        k: as q.
        v: [total, heads, V].
        a: [total, heads].
        b: [total, heads].
        A_log: [heads].
        dt_bias: [heads].
        checkpoint_state: [slots, heads, V, K]; not modified.
        d_cache: [rows, heads, ring, V], written.
        k_cache: [rows, key_heads, ring, K], written.
        g_cache: [rows, heads, ring], written.
        out: [total, heads, V], written.
        query_start_loc: [requests + 1] int.
        ssm_state_indices: [requests or more] int, state slots.
        replay_indices: [requests or more] int, rows of the caches.
        scale: of the queries; 1 / sqrt(K) by default.

    Returns:
        ``out``.
    """
    requests = len(query_start_loc) - 1
    state = checkpoint_state[valid_slots(ssm_state_indices[:requests])].to(compute_dtype(v))
    block = equal_blocks(q, k, v, a, b, A_log, dt_bias, scale, requests)
    read, updates = run_block(state, block)
    rows, tokens = replay_indices[:requests].long(), block.value.shape[2]
    d_cache[rows, :, :tokens] = updates.update.to(d_cache.dtype)
    k_cache[rows, :, :tokens] = updates.key.to(k_cache.dtype)
    g_cache[rows, :, :tokens] = updates.decay.to(g_cache.dtype)
    return out.copy_(read.transpose(1, 2).reshape(v.shape))


def commit_gdn_replayssm_spec(**_: Any) -> None:
    """Replace the update of the ring's cursors: they stay at 0."""


def commit_gdn_replayssm_circular(
    *,
    checkpoint_state: Tensor,
    d_cache: Tensor,
    k_cache: Tensor,
    g_cache: Tensor,
    state_batch_indices: Tensor,
    replay_indices: Tensor,
    accept_lens: Tensor,
    mamba_track_indices: Tensor | None = None,
    mamba_steps_to_track: Tensor | None = None,
    **_: Any,
) -> None:
    """Commit: apply the committed tokens of each request to its state, in all layers.

    Args:
        checkpoint_state: [layers, slots, heads, V, K], written.
        d_cache: [layers, rows, heads, ring, V].
        k_cache: [layers, rows, key_heads, ring, K].
        g_cache: [layers, rows, heads, ring].
        state_batch_indices: [requests] int, state slots.
        replay_indices: [requests] int, rows of the caches.
        accept_lens: [requests] int, committed tokens, at least 1.
        mamba_track_indices: [requests] int, state slots of the prefix cache; negative for none.
        mamba_steps_to_track: [requests] int, the token whose state is copied there; negative for
            none.
    """
    rows = replay_indices.long()
    slots = valid_slots(state_batch_indices)
    longest = int(accept_lens.max())
    updates = Updates(
        d_cache[:, rows, :, :longest], k_cache[:, rows, :, :longest], g_cache[:, rows, :, :longest]
    )
    state = checkpoint_state[:, slots]
    if mamba_track_indices is not None and mamba_steps_to_track is not None:
        tracked = torch.nonzero((mamba_steps_to_track >= 0) & (mamba_track_indices >= 0)).flatten()
        if tracked.numel():
            part = Updates(*(x[:, tracked] for x in updates))
            crossing = apply_updates(state[:, tracked], part, mamba_steps_to_track[tracked] + 1)
            checkpoint_state[:, mamba_track_indices[tracked].long()] = crossing
    checkpoint_state[:, slots] = apply_updates(state, updates, accept_lens)
