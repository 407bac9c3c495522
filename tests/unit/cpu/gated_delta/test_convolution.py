"""The causal convolution before the delta rule, against torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_sglang.cpu.gated_delta import conv_kernels

CHANNELS, KERNEL_SIZE, SLOTS = 6, 4, 9
LENGTHS = [5, 1, 2, 9]  # shorter than the window, and longer
CLOSE: dict[str, Any] = {"atol": 1e-12, "rtol": 1e-12}  # float64


def by_definition(history: Tensor, tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """torch's convolution of [channels, time]."""
    inputs = torch.cat([history, tokens], dim=1).unsqueeze(0)
    return F.silu(F.conv1d(inputs, weight.unsqueeze(1), bias, groups=len(weight)))[0]


@pytest.mark.parametrize("with_bias", [False, True])
def test_prefill_convolves_each_request_behind_its_history(
    random: torch.Generator, with_bias: bool
) -> None:
    """Catches a neighbour's token inside a window, and a window kept at the wrong place."""
    double: dict[str, Any] = {"generator": random, "dtype": torch.float64}
    weight = torch.randn(CHANNELS, KERNEL_SIZE, **double)
    bias = torch.randn(CHANNELS, **double) if with_bias else None
    pool = torch.randn(SLOTS, CHANNELS, KERNEL_SIZE - 1, **double)
    tokens = torch.randn(sum(LENGTHS), CHANNELS, **double)
    slots, begun = torch.tensor([4, 8, 2, 5]), torch.tensor([True, False, True, True])
    before = pool.clone()
    output = conv_kernels.causal_conv1d_fn(
        tokens.t(),
        weight,
        bias,
        pool,
        torch.tensor([0, *LENGTHS]).cumsum(0).int(),
        cache_indices=slots.int(),
        has_initial_state=begun,
    )
    assert output.t().is_contiguous()  # SGLang views the channels of a token
    for slot, has_state, own, got in zip(
        slots, begun, torch.split(tokens, LENGTHS), torch.split(output.t(), LENGTHS), strict=True
    ):
        history = before[slot] * has_state
        torch.testing.assert_close(got.t(), by_definition(history, own.t(), weight, bias), **CLOSE)
        window = torch.cat([history, own.t()], dim=1)[:, -(KERNEL_SIZE - 1) :]
        assert torch.equal(pool[slot], window)


def test_decode_goes_on_where_prefill_stopped(random: torch.Generator) -> None:
    double: dict[str, Any] = {"generator": random, "dtype": torch.float64}
    weight = torch.randn(CHANNELS, KERNEL_SIZE, **double)
    pool = torch.randn(SLOTS, CHANNELS, KERNEL_SIZE - 1, **double)
    tokens = torch.randn(3, 7, CHANNELS, **double)
    slots = torch.tensor([1, 6, 3])
    before = pool.clone()
    for step in range(7):
        got = conv_kernels.causal_conv1d_update(
            tokens[:, step], pool, weight, activation="silu", conv_state_indices=slots
        )
        for i, slot in enumerate(slots):
            expected = by_definition(before[slot], tokens[i].t(), weight, None)
            torch.testing.assert_close(got[i], expected[:, step], **CLOSE)
