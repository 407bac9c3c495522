"""Stand-ins for SGLang's replay of a verified block: nothing is stored per token but its update.

A verify records (d, k, g) of every token of the block beside the state, which it leaves as it is; a
commit applies those of the accepted tokens to it. SGLang's ring can keep committed tokens for some
steps before it does. The host has it do so at every commit, so a block is always recorded from the
first place on and the ring's cursors can stay where they are: docs/recurrent-state.md.
"""

# ruff: noqa: N803 (SGLang names its arguments)

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dflash_sglang.cpu.gated_delta.delta_rule import Updates, advance, run_block
from dflash_sglang.cpu.gated_delta.packing import equal_blocks, precision, usable


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
    """Verify: the outputs of a block of each request, and the record of it.

    Args:
        q: [total, key_heads, K], ``total`` being equal blocks of the requests.
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
        ssm_state_indices: [requests or more] int, slots.
        replay_indices: [requests or more] int, rows.
        scale: of the queries; 1 / sqrt(K) by default.

    Returns:
        ``out``.
    """
    requests = len(query_start_loc) - 1
    state = checkpoint_state[usable(ssm_state_indices[:requests])].to(precision(v))
    block = equal_blocks(q, k, v, a, b, A_log, dt_bias, scale, requests)
    read, updates = run_block(state, block)
    rows, tokens = replay_indices[:requests].long(), block.value.shape[2]
    d_cache[rows, :, :tokens] = updates.update.to(d_cache.dtype)
    k_cache[rows, :, :tokens] = updates.key.to(k_cache.dtype)
    g_cache[rows, :, :tokens] = updates.decay.to(g_cache.dtype)
    return out.copy_(read.transpose(1, 2).reshape(v.shape))


def commit_gdn_replayssm_spec(**_: Any) -> None:
    """In place of moving the ring's cursors on: they stay at zero."""


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
    """Commit: applies the accepted tokens of each request to its state, in all layers.

    Args:
        checkpoint_state: [layers, slots, heads, V, K], written.
        d_cache: [layers, rows, heads, ring, V].
        k_cache: [layers, rows, key_heads, ring, K].
        g_cache: [layers, rows, heads, ring].
        state_batch_indices: [requests] int, slots.
        replay_indices: [requests] int, rows.
        accept_lens: [requests] int, committed tokens, at least 1.
        mamba_track_indices: [requests] int, slots for the states of the prefix cache; negative for
            none.
        mamba_steps_to_track: [requests] int, the token whose state goes there; negative for none.
    """
    rows = replay_indices.long()
    slots = usable(state_batch_indices)
    longest = int(accept_lens.max())
    updates = Updates(
        d_cache[:, rows, :, :longest], k_cache[:, rows, :, :longest], g_cache[:, rows, :, :longest]
    )
    state = checkpoint_state[:, slots]
    if mamba_track_indices is not None and mamba_steps_to_track is not None:
        tracked = torch.nonzero((mamba_steps_to_track >= 0) & (mamba_track_indices >= 0)).flatten()
        if tracked.numel():
            part = Updates(*(x[:, tracked] for x in updates))
            crossing = advance(state[:, tracked], part, mamba_steps_to_track[tracked] + 1)
            checkpoint_state[:, mamba_track_indices[tracked].long()] = crossing
    checkpoint_state[:, slots] = advance(state, updates, accept_lens)
