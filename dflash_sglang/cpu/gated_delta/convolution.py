"""The short causal convolution before the delta rule, over rows of tokens.

    y_t = silu(bias + sum_j w_j x_{t - kernel_size + 1 + j})      per channel

The state of a request is its last ``kernel_size - 1`` inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve every token whose ``kernel_size - 1`` predecessors are given.

    Args:
        inputs: [..., kernel_size - 1 + tokens, channels].
        weight: [channels, kernel_size].
        bias: [channels] or None.

    Returns:
        [..., tokens, channels], new and contiguous, in the dtype of ``inputs``.
    """
    kernel_size = weight.shape[1]
    tokens = inputs.shape[-2] - kernel_size + 1
    factors = weight.to(inputs.dtype).t().contiguous()  # [kernel_size, channels]
    total = inputs[..., :tokens, :] * factors[0]
    if bias is not None:
        total += bias.to(inputs.dtype)
    for j in range(1, kernel_size):
        total.addcmul_(inputs[..., j : j + tokens, :], factors[j])
    return F.silu(total, inplace=True)


def with_history(history: Tensor, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Put the history of each packed request before its tokens.

    Args:
        history: [requests, kernel_size - 1, channels].
        tokens: [total, channels], packed request after request.
        lengths: [requests] int64, summing to ``total``.

    Returns:
        [requests * (kernel_size - 1) + total, channels], each request's history before its tokens,
        and [requests] int64, the row at which each request's history starts.
    """
    requests, past, channels = history.shape
    starts = lengths.cumsum(0) - lengths + past * torch.arange(requests)
    joined = tokens.new_empty(requests * past + len(tokens), channels)
    joined[row_ranges(starts, past)] = history.to(tokens.dtype)
    joined[_token_rows(starts + past, lengths)] = tokens
    return joined, starts


def convolve_packed(
    history: Tensor, tokens: Tensor, lengths: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Convolve packed requests of different lengths.

    Args:
        history: [requests, kernel_size - 1, channels], zero for a new request.
        tokens: [total, channels].
        lengths: [requests] int64.
        weight: [channels, kernel_size].
        bias: [channels] or None.

    Returns:
        [total, channels], and the new history, shaped as ``history``.
    """
    past = history.shape[1]
    joined, starts = with_history(history, tokens, lengths)
    output = convolve(joined, weight, bias)[_token_rows(starts, lengths)]
    return output, joined[row_ranges(starts + lengths, past)]


def row_ranges(starts: Tensor, count: int) -> Tensor:
    """[requests, count] int64: the ``count`` rows from each start."""
    return starts[:, None] + torch.arange(count)


def _token_rows(starts: Tensor, lengths: Tensor) -> Tensor:
    """[total] int64: the ``length`` rows from each start, request after request."""
    offset = starts - (lengths.cumsum(0) - lengths)
    return torch.arange(int(lengths.sum())) + offset.repeat_interleave(lengths)
