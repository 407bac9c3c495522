"""Replacements of SGLang's causal convolution kernels, with their signatures."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dflash_sglang.cpu.gated_delta.convolution import convolve, convolve_packed
from dflash_sglang.cpu.gated_delta.kernel_args import require, valid_slots


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    *,
    cache_indices: Tensor,
    has_initial_state: Tensor,
    activation: str | None = "silu",
    **_: Any,
) -> Tensor:
    """Prefill: convolve packed requests and store their last inputs in the pool.

    Args:
        x: [channels, total], a transposed view of rows of tokens.
        weight: [channels, kernel_size].
        bias: [channels] or None.
        conv_states: [slots, channels, kernel_size - 1], written.
        query_start_loc: [requests + 1] int32.
        cache_indices: [requests] int, state slots.
        has_initial_state: [requests] bool, whether a slot holds a request's previous inputs.
        activation: ``silu``.

    Returns:
        [channels, total], a transposed view of rows of tokens.

    Raises:
        PlatformError: another activation.
    """
    require(activation == "silu", "causal_conv1d_fn", "activation='silu'")
    slots = valid_slots(cache_indices)
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
    *,
    conv_state_indices: Tensor,
    intermediate_conv_window: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Decode and verify: convolve the same number of tokens of each request.

    A decode updates the windows in the pool. A verify does not: it stores the window after each
    token in ``intermediate_conv_window``.

    Args:
        x: [requests, channels], or [requests, channels, tokens] as a view of rows of tokens.
        conv_state: [slots, channels, kernel_size - 1].
        weight: [channels, kernel_size].
        bias: [channels] or None.
        activation: ``silu``.
        conv_state_indices: [requests] int, state slots.
        intermediate_conv_window: [rows, block, channels, kernel_size - 1], overlapping views: the
            window after token t + 1 is that after token t shifted by one input. Given for a verify.
        intermediate_state_indices: [requests] int, rows of ``intermediate_conv_window``; given
            together with it.

    Returns:
        Shaped as x, and with its memory layout.

    Raises:
        PlatformError: another activation, or windows that are not overlapping views.
    """
    require(activation == "silu", "causal_conv1d_update", "activation='silu'")
    slots = valid_slots(conv_state_indices)
    tokens = x.unsqueeze(1) if x.dim() == 2 else x.mT  # [requests, tokens, channels]
    inputs = torch.cat((conv_state[slots].mT.to(x.dtype), tokens), dim=1)
    output = convolve(inputs, weight, bias)
    if intermediate_conv_window is not None:
        assert intermediate_state_indices is not None
        store_windows(intermediate_conv_window, intermediate_state_indices.long(), inputs)
    else:
        past = conv_state.shape[-1]
        conv_state[slots] = inputs[:, -past:].mT.to(conv_state.dtype)
    return output.squeeze(1) if x.dim() == 2 else output.mT


def store_windows(windows: Tensor, rows: Tensor, inputs: Tensor) -> None:
    """Store the window after each token of a block.

    Args:
        windows: [rows, block, channels, kernel_size - 1], overlapping views of consecutive inputs.
        rows: [requests] int64.
        inputs: [requests, kernel_size - 1 + tokens, channels]; the window after the first token
            starts at index 1.

    Raises:
        PlatformError: the windows are not overlapping views.
    """
    count, block, channels, past = windows.shape
    step, channel, column = windows.stride()[1:]
    require(step == column, "causal_conv1d_update", "windows that are overlapping views")
    shared = windows.as_strided(
        (count, channels, block + past - 1), (windows.stride(0), channel, column)
    )
    shared[rows, :, : inputs.shape[1] - 1] = inputs[:, 1:].mT.to(windows.dtype)
