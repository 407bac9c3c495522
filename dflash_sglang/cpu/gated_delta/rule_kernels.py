"""Replacements of SGLang's gated delta rule kernels, with their signatures."""

# ruff: noqa: N803 (SGLang names its arguments)

from __future__ import annotations

from typing import Any

from torch import Tensor

from dflash_sglang.cpu.gated_delta.delta_rule import (
    CHUNK,
    TokenBlock,
    apply_updates,
    gates,
    run_block,
    states_after_each_token,
    unit_length,
)
from dflash_sglang.cpu.gated_delta.kernel_args import (
    compute_dtype,
    equal_blocks,
    pack_block,
    require,
    token_rows,
    valid_slots,
)
from dflash_sglang.errors import PlatformError


def fused_gdn_gating(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, beta: float = 1.0, threshold: float = 20.0
) -> tuple[Tensor, Tensor]:
    """Log decay and beta of every token, each [1, tokens, heads].

    Args:
        A_log: [heads].
        a: [tokens, heads].
        b: [tokens, heads].
        dt_bias: [heads].
        beta: 1, of the softplus.
        threshold: 20, of the softplus.

    Raises:
        PlatformError: another beta or threshold.
    """
    require(
        (beta, threshold) == (1.0, 20.0), "fused_gdn_gating", "a softplus of beta 1, threshold 20"
    )
    decay, strength = gates(a, b, A_log, dt_bias, compute_dtype(a))
    return decay.unsqueeze(0), strength.unsqueeze(0)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    *,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    inplace_update: bool = True,
) -> tuple[Tensor, None, Tensor]:
    """Prefill: the recurrence over packed requests, one chunk of all requests at a time.

    Args:
        q: [1, total, key_heads, K].
        k: as q.
        v: [1, total, heads, V].
        g: [1, total, heads].
        beta: as g.
        scale: of the queries; 1 / sqrt(K) by default.
        initial_state: [slots, heads, V, K]; the new states are written to it.
        initial_state_indices: [requests] int, state slots.
        cu_seqlens: [requests + 1] int, the cumulative lengths.
        head_first: False.
        use_qk_l2norm_in_kernel: True.
        inplace_update: whether to write the states.

    Returns:
        [1, total, heads, V], None, and the state before every chunk of every request,
        [1, chunks, heads, V, K].

    Raises:
        PlatformError: queries that are normalised elsewhere, or the layout ``head_first``.
    """
    require(use_qk_l2norm_in_kernel, "chunk_gated_delta_rule", "use_qk_l2norm_in_kernel=True")
    require(not head_first, "chunk_gated_delta_rule", "head_first=False")
    slots, starts, lengths = valid_slots(initial_state_indices), cu_seqlens[:-1], cu_seqlens.diff()
    chunks = (lengths + CHUNK - 1) // CHUNK
    first_chunk = chunks.cumsum(0) - chunks
    # Longest first, so that the requests with tokens left are always the first rows.
    order = lengths.argsort(descending=True)
    slots, starts, lengths = slots[order], starts[order], lengths[order]
    first_chunk = first_chunk[order]
    rows = token_rows(starts, lengths, v.shape[1])
    inputs = pack_block(q[0], k[0], v[0], g[0], beta[0], scale, rows)
    state = initial_state[slots].to(inputs.value.dtype)
    before = state.new_empty(int(chunks.sum()), *state.shape[1:])
    output = v.new_empty(v.shape[1] + 1, *v.shape[2:])
    for number, begin in enumerate(range(0, rows.shape[1], CHUNK)):
        active, end = int((lengths > begin).sum()), begin + CHUNK
        before[first_chunk[:active] + number] = state[:active]
        chunk = TokenBlock(*(part[:active, :, begin:end] for part in inputs))
        read, updates = run_block(state[:active], chunk)
        state[:active] = apply_updates(state[:active], updates)
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
        mixed_qkv: [requests, 2 * key_heads * K + heads * V], after the convolution.
        a: [requests, heads].
        b: [requests, heads].
        A_log: [heads].
        dt_bias: [heads].
        scale: of the queries.
        initial_state: [slots, heads, V, K], updated in place.
        out: [requests, 1, heads, V], written.
        ssm_state_indices: [requests] int, state slots.
        use_qk_l2norm_in_kernel: True.

    Returns:
        ``out`` and ``initial_state``.

    Raises:
        PlatformError: queries that are normalised elsewhere.
    """
    require(
        use_qk_l2norm_in_kernel,
        "fused_recurrent_gated_delta_rule_packed_decode",
        "use_qk_l2norm_in_kernel=True",
    )
    heads, v_dim, k_dim = initial_state.shape[1:]
    keys = mixed_qkv.shape[1] - heads * v_dim
    query, key = mixed_qkv[:, :keys].reshape(len(mixed_qkv), 2, -1, 1, k_dim).unbind(1)
    value = mixed_qkv[:, keys:].reshape(-1, heads, 1, v_dim)
    slots, dtype = valid_slots(ssm_state_indices), compute_dtype(mixed_qkv)
    decay, beta = (x.unsqueeze(-1) for x in gates(a, b, A_log, dt_bias, dtype))
    block = TokenBlock(
        unit_length(query.to(dtype)) * scale,
        unit_length(key.to(dtype)),
        value.to(dtype),
        decay,
        beta,
    )
    state = initial_state[slots].to(dtype)
    read, updates = run_block(state, block)
    initial_state[slots] = apply_updates(state, updates).to(initial_state.dtype)
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
    *,
    cu_seqlens: Tensor,
    is_kda: bool = False,
    lower_bound: float | None = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Verify with snapshots: one block per request, storing the state after every token.

    Args:
        A_log: [heads].
        a: [total, heads].
        dt_bias: [heads].
        softplus_beta: 1.
        softplus_threshold: 20.
        q: [1, total, key_heads, K]; ``total`` = requests * block.
        k: as q.
        v: [1, total, heads, V].
        b: [total, heads].
        initial_state_source: [slots, heads, V, K]; not modified.
        initial_state_indices: [requests or more] int, state slots.
        scale: of the queries; 1 / sqrt(K) by default.
        use_qk_l2norm_in_kernel: True.
        cu_seqlens: [requests + 1] int.
        is_kda: False.
        lower_bound: unused; of other kinds of layers.
        disable_state_update: True.
        intermediate_states_buffer: [rows, block, heads, V, K], written.
        intermediate_state_indices: [requests or more] int, rows of that buffer.

    Returns:
        [1, total, heads, V].

    Raises:
        PlatformError: queries that are normalised elsewhere, another kind of layer, or a call that
            is no verify.
    """
    kernel = "fused_sigmoid_gating_delta_rule_update"
    require(use_qk_l2norm_in_kernel, kernel, "use_qk_l2norm_in_kernel=True")
    require(not is_kda, kernel, "is_kda=False")
    require(disable_state_update, kernel, "a verify (disable_state_update=True)")
    if intermediate_states_buffer is None or intermediate_state_indices is None:
        raise PlatformError(f"{kernel} supports only a verify with an intermediate_states_buffer")
    requests = len(cu_seqlens) - 1
    state = initial_state_source[valid_slots(initial_state_indices[:requests])].to(compute_dtype(v))
    block = equal_blocks(q[0], k[0], v[0], a, b, A_log, dt_bias, scale, requests)
    read, updates = run_block(state, block)
    rows = intermediate_state_indices[:requests].long()
    states = states_after_each_token(state, updates)
    intermediate_states_buffer[rows, : states.shape[1]] = states.to(
        intermediate_states_buffer.dtype
    )
    return read.transpose(1, 2).reshape(v.shape).to(v.dtype)
