"""Stand-ins for SGLang's kernels of a gated-delta-net layer, with their signatures.

Slots index SGLang's state pools. A negative slot marks padding: its results are not read, and it is
sent to slot 0, which the pools keep for that.
"""

# ruff: noqa: N803 (SGLang names its arguments)

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_sglang.cpu.recurrent.convolution import convolve, convolve_packed
from dflash_sglang.cpu.recurrent.delta_rule import (
    CHUNK,
    Block,
    advance,
    every_state,
    gates,
    run_block,
    unit_length,
)


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    seq_lens_cpu: Any = None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    activation: str | None = "silu",
    **_: Any,
) -> Tensor:
    """Prefill: convolves packed requests and leaves their last inputs in the pool.

    Args:
        x: [channels, total], a transposed view of rows of tokens.
        weight: [channels, width].
        bias: [channels] or None.
        conv_states: [slots, channels, width - 1], written.
        query_start_loc: [requests + 1] int32.
        seq_lens_cpu: unused; the lengths are host memory already.
        cache_indices: [requests] int, slots.
        has_initial_state: [requests] bool, whether a slot holds what came before.
        activation: SiLU.

    Returns:
        [channels, total], again a view of rows of tokens.
    """
    assert activation == "silu"
    assert cache_indices is not None
    assert has_initial_state is not None
    slots = usable(cache_indices)
    history = conv_states[slots] * has_initial_state[:, None, None]
    lengths = query_start_loc.long().diff()
    output, history = convolve_packed(
        history.mT.to(x.dtype), x.t()[: int(lengths.sum())], lengths, weight, bias
    )
    conv_states[slots] = history.mT.to(conv_states.dtype)
    return output.t()


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    conv_state_indices: Tensor | None = None,
    intermediate_conv_window: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Decode and verify: convolves equally many tokens of each request.

    A decode moves the pool's window on. A verify leaves the pool alone and keeps the window after
    each token beside it.

    Args:
        x: [requests, channels], or [requests, channels, tokens] as a view of rows of tokens.
        conv_state: [slots, channels, width - 1].
        weight: [channels, width].
        bias: [channels] or None.
        activation: SiLU.
        conv_state_indices: [requests] int, slots.
        intermediate_conv_window: [rows, block, channels, width - 1], overlapping views: step t + 1
            is step t moved on by one input. Where it is given, a verify.
        intermediate_state_indices: [requests] int, rows of it.

    Returns:
        Shaped as x, and with its memory layout.
    """
    assert activation == "silu"
    assert conv_state_indices is not None
    slots = usable(conv_state_indices)
    tokens = x.unsqueeze(1) if x.dim() == 2 else x.mT  # [requests, tokens, channels]
    inputs = torch.cat((conv_state[slots].mT.to(x.dtype), tokens), dim=1)
    output = convolve(inputs, weight, bias)
    if intermediate_conv_window is not None:
        assert intermediate_state_indices is not None
        keep_windows(intermediate_conv_window, intermediate_state_indices.long(), inputs)
    else:
        past = conv_state.shape[-1]
        conv_state[slots] = inputs[:, -past:].mT.to(conv_state.dtype)
    return output.squeeze(1) if x.dim() == 2 else output.mT


def keep_windows(windows: Tensor, rows: Tensor, inputs: Tensor) -> None:
    """Writes the window behind every token of a block.

    Args:
        windows: [rows, block, channels, width - 1], overlapping views of one run of inputs a row.
        rows: [requests] int64.
        inputs: [requests, width - 1 + tokens, channels]; the first token's window begins at its
            second row.
    """
    count, block, channels, past = windows.shape
    step, channel, column = windows.stride()[1:]
    assert step == column, "the windows of a block are stored as one run of inputs"
    shared = windows.as_strided(
        (count, channels, block + past - 1), (windows.stride(0), channel, column)
    )
    shared[rows, :, : inputs.shape[1] - 1] = inputs[:, 1:].mT.to(windows.dtype)


def fused_gdn_gating(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, beta: float = 1.0, threshold: float = 20.0
) -> tuple[Tensor, Tensor]:
    """Decay and strength of every token, each [1, tokens, heads]."""
    assert (beta, threshold) == (1.0, 20.0), "the parameters of torch's softplus"
    decay, strength = gates(a, b, A_log, dt_bias, precision(a))
    return decay.unsqueeze(0), strength.unsqueeze(0)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    inplace_update: bool = True,
) -> tuple[Tensor, None, Tensor]:
    """Prefill: the recurrence over packed requests, a chunk at a time for all of them.

    Args:
        q: [1, total, key_heads, K].
        k: as q.
        v: [1, total, heads, V].
        g: [1, total, heads].
        beta: as g.
        scale: of the queries; 1 / sqrt(K) by default.
        initial_state: [slots, heads, V, K]; the states after the requests are written to it.
        initial_state_indices: [requests] int, slots.
        cu_seqlens: [requests + 1] int, where requests begin.
        head_first: False.
        use_qk_l2norm_in_kernel: True.
        inplace_update: whether to write the states.

    Returns:
        [1, total, heads, V], None, and the state at the beginning of every chunk of every request,
        [1, chunks, heads, V, K].
    """
    assert use_qk_l2norm_in_kernel
    assert not head_first
    assert initial_state is not None
    assert initial_state_indices is not None
    assert cu_seqlens is not None
    slots, starts, lengths = usable(initial_state_indices), cu_seqlens[:-1], cu_seqlens.diff()
    chunks = (lengths + CHUNK - 1) // CHUNK
    first_chunk = chunks.cumsum(0) - chunks
    # Longest first: the requests that still have tokens are then always the first rows.
    order = lengths.argsort(descending=True)
    slots, starts, lengths = slots[order], starts[order], lengths[order]
    first_chunk = first_chunk[order]
    rows = _token_rows(starts, lengths, v.shape[1])
    inputs = _block(q[0], k[0], v[0], g[0], beta[0], scale, rows)
    state = initial_state[slots].to(inputs.value.dtype)
    before = state.new_empty(int(chunks.sum()), *state.shape[1:])
    output = v.new_empty(v.shape[1] + 1, *v.shape[2:])
    for number, begin in enumerate(range(0, rows.shape[1], CHUNK)):
        active, end = int((lengths > begin).sum()), begin + CHUNK
        before[first_chunk[:active] + number] = state[:active]
        chunk = Block(*(part[:active, :, begin:end] for part in inputs))
        read, updates = run_block(state[:active], chunk)
        state[:active] = advance(state[:active], updates)
        output[rows[:active, begin:end]] = read.transpose(1, 2).to(v.dtype)
    if inplace_update:
        initial_state[slots] = state.to(initial_state.dtype)
    return output[:-1].unsqueeze(0), None, before.unsqueeze(0)


def fused_recurrent_gated_delta_rule_packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:
    """Decode: one token of each request.

    Args:
        mixed_qkv: [requests, 2 * key_heads * K + heads * V], convolved.
        a: [requests, heads].
        b: [requests, heads].
        A_log: [heads].
        dt_bias: [heads].
        scale: of the queries.
        initial_state: [slots, heads, V, K], moved on in place.
        out: [requests, 1, heads, V], written.
        ssm_state_indices: [requests] int, slots.
        use_qk_l2norm_in_kernel: True.

    Returns:
        ``out`` and ``initial_state``.
    """
    assert use_qk_l2norm_in_kernel
    heads, v_dim, k_dim = initial_state.shape[1:]
    keys = mixed_qkv.shape[1] - heads * v_dim
    query, key = mixed_qkv[:, :keys].reshape(len(mixed_qkv), 2, -1, 1, k_dim).unbind(1)
    value = mixed_qkv[:, keys:].reshape(-1, heads, 1, v_dim)
    slots, dtype = usable(ssm_state_indices), precision(mixed_qkv)
    decay, beta = (x.unsqueeze(-1) for x in gates(a, b, A_log, dt_bias, dtype))
    block = Block(
        unit_length(query.to(dtype)) * scale,
        unit_length(key.to(dtype)),
        value.to(dtype),
        decay,
        beta,
    )
    state = initial_state[slots].to(dtype)
    read, updates = run_block(state, block)
    initial_state[slots] = advance(state, updates).to(initial_state.dtype)
    out.copy_(read.transpose(1, 2))
    return out, initial_state


def fused_sigmoid_gating_delta_rule_update(
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    softplus_beta: float,
    softplus_threshold: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    is_kda: bool = False,
    lower_bound: float | None = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Verify with snapshots: a block of each request, keeping the state after every token of it.

    Args:
        A_log: [heads].
        a: [total, heads].
        dt_bias: [heads].
        softplus_beta: 1.
        softplus_threshold: 20.
        q: [1, total, key_heads, K], ``total`` being equal blocks of the requests.
        k: as q.
        v: [1, total, heads, V].
        b: [total, heads].
        initial_state_source: [slots, heads, V, K]; not modified.
        initial_state_indices: [requests or more] int, slots.
        scale: of the queries; 1 / sqrt(K) by default.
        use_qk_l2norm_in_kernel: True.
        cu_seqlens: [requests + 1] int.
        is_kda: False.
        lower_bound: for other layers only.
        disable_state_update: True.
        intermediate_states_buffer: [rows, block, heads, V, K], written.
        intermediate_state_indices: [requests or more] int, rows of it.

    Returns:
        [1, total, heads, V].
    """
    assert use_qk_l2norm_in_kernel
    assert disable_state_update
    assert not is_kda
    assert cu_seqlens is not None
    assert intermediate_states_buffer is not None
    assert intermediate_state_indices is not None
    requests = len(cu_seqlens) - 1
    state = initial_state_source[usable(initial_state_indices[:requests])].to(precision(v))
    block = equal_blocks(q[0], k[0], v[0], a, b, A_log, dt_bias, scale, requests)
    read, updates = run_block(state, block)
    rows = intermediate_state_indices[:requests].long()
    states = every_state(state, updates)
    intermediate_states_buffer[rows, : states.shape[1]] = states.to(
        intermediate_states_buffer.dtype
    )
    return read.transpose(1, 2).reshape(v.shape).to(v.dtype)


def equal_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    scale: float | None,
    requests: int,
) -> Block:
    """Tokens of equally long requests, [total, heads, dim] or [total, heads], as a block."""
    shape = (requests, len(value) // max(requests, 1))
    rows = torch.arange(len(value)).view(shape)
    decay, beta = gates(a, b, a_log, dt_bias, precision(value))
    return _block(query, key, value, decay, beta, scale, rows)


def _block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    scale: float | None,
    rows: Tensor,
) -> Block:
    """Packed tokens as a block.

    Args:
        query: [total, key_heads, K].
        key: as query.
        value: [total, heads, V].
        decay: [total, heads].
        beta: [total, heads].
        scale: of the queries; 1 / sqrt(K) by default.
        rows: [requests, tokens] int64, places of the tokens; ``total`` for padding.
    """
    dtype = precision(value)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    parts = [
        unit_length(query.to(dtype)) * scale,
        unit_length(key.to(dtype)),
        value.to(dtype),
        decay.to(dtype),
        beta.to(dtype),
    ]
    if int(rows.max()) == len(value):
        parts = [F.pad(part, (0, 0) * (part.dim() - 1) + (0, 1)) for part in parts]
    return Block(*(part[rows].transpose(1, 2) for part in parts))


def _token_rows(starts: Tensor, lengths: Tensor, padding: int) -> Tensor:
    """[requests, longest] int64: where each request's tokens are, ``padding`` behind its end."""
    step = torch.arange(int(lengths.max()))
    return torch.where(step < lengths[:, None], starts[:, None] + step, padding)


def precision(x: Tensor) -> torch.dtype:
    """What to compute in: float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)


def usable(slots: Tensor) -> Tensor:
    """Slots as int64, padding sent to the slot that is kept for it."""
    return slots.clamp(min=0).long()
