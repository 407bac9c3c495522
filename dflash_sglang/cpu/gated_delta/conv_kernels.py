"""Stand-ins for SGLang's kernels of the convolution, with their signatures."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dflash_sglang.cpu.gated_delta.convolution import convolve, convolve_packed
from dflash_sglang.cpu.gated_delta.packing import usable


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
