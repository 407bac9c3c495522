"""The short causal convolution in front of a recurrence, over rows of tokens.

    y_t = silu(bias + sum_j w_j x_{t - width + 1 + j})      each channel by itself

The state of a request is its last ``width - 1`` inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The convolution of every token whose ``width - 1`` predecessors are given.

    Args:
        inputs: [..., width - 1 + tokens, channels].
        weight: [channels, width].
        bias: [channels] or None.

    Returns:
        [..., tokens, channels], new and contiguous, in the dtype of ``inputs``.
    """
    width = weight.shape[1]
    tokens = inputs.shape[-2] - width + 1
    taps = weight.to(inputs.dtype).t().contiguous()  # [width, channels]
    total = inputs[..., :tokens, :] * taps[0]
    if bias is not None:
        total += bias.to(inputs.dtype)
    for j in range(1, width):
        total.addcmul_(inputs[..., j : j + tokens, :], taps[j])
    return F.silu(total, inplace=True)


def with_history(history: Tensor, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Interleaves packed requests with what came before each.

    Args:
        history: [requests, width - 1, channels].
        tokens: [total, channels], the requests' tokens one after the other.
        lengths: [requests] int64, summing to ``total``.

    Returns:
        [requests * (width - 1) + total, channels], each request's history before its tokens, and
        [requests] int64, the row at which each request's history begins.
    """
    requests, past, channels = history.shape
    starts = lengths.cumsum(0) - lengths + past * torch.arange(requests)
    joined = tokens.new_empty(requests * past + len(tokens), channels)
    joined[rows_from(starts, past)] = history.to(tokens.dtype)
    joined[_token_rows(starts + past, lengths)] = tokens
    return joined, starts


def convolve_packed(
    history: Tensor, tokens: Tensor, lengths: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The convolution over requests of different lengths.

    Args:
        history: [requests, width - 1, channels], zero for what begins here.
        tokens: [total, channels].
        lengths: [requests] int64.
        weight: [channels, width].
        bias: [channels] or None.

    Returns:
        [total, channels] and the new history, shaped as the old.
    """
    past = history.shape[1]
    joined, starts = with_history(history, tokens, lengths)
    output = convolve(joined, weight, bias)[_token_rows(starts, lengths)]
    return output, joined[rows_from(starts + lengths, past)]


def rows_from(starts: Tensor, count: int) -> Tensor:
    """[requests, count] int64: ``count`` rows from each start on."""
    return starts[:, None] + torch.arange(count)


def _token_rows(starts: Tensor, lengths: Tensor) -> Tensor:
    """[total] int64: ``length`` rows from each start on, one request after the other."""
    offset = starts - (lengths.cumsum(0) - lengths)
    return torch.arange(int(lengths.sum())) + offset.repeat_interleave(lengths)
