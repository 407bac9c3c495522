"""The convolution in front of a recurrence, and the small ops around it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_sglang.cpu.gated_delta import conv_kernels, layers

CHANNELS, WIDTH, SLOTS = 6, 4, 9
LENGTHS = [5, 1, 2, 9]  # shorter than the window, and longer
CLOSE = {"atol": 1e-12, "rtol": 1e-12}  # float64


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(2)


def by_definition(history: Tensor, tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """torch's convolution of [channels, time]."""
    inputs = torch.cat([history, tokens], dim=1).unsqueeze(0)
    return F.silu(F.conv1d(inputs, weight.unsqueeze(1), bias, groups=len(weight)))[0]


@pytest.mark.parametrize("with_bias", [False, True])
def test_prefill_convolves_each_request_behind_its_history(
    random: torch.Generator, with_bias: bool
) -> None:
    """Catches a neighbour's token inside a window, and a window kept at the wrong place."""
    double = {"generator": random, "dtype": torch.float64}
    weight = torch.randn(CHANNELS, WIDTH, **double)
    bias = torch.randn(CHANNELS, **double) if with_bias else None
    pool = torch.randn(SLOTS, CHANNELS, WIDTH - 1, **double)
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
    for slot, known, own, got in zip(
        slots, begun, tokens.split(LENGTHS), output.t().split(LENGTHS), strict=True
    ):
        history = before[slot] * known
        torch.testing.assert_close(got.t(), by_definition(history, own.t(), weight, bias), **CLOSE)
        window = torch.cat([history, own.t()], dim=1)[:, -(WIDTH - 1) :]
        assert torch.equal(pool[slot], window)


def test_decode_goes_on_where_prefill_stopped(random: torch.Generator) -> None:
    double = {"generator": random, "dtype": torch.float64}
    weight = torch.randn(CHANNELS, WIDTH, **double)
    pool = torch.randn(SLOTS, CHANNELS, WIDTH - 1, **double)
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


def test_projections_are_split_where_sglang_packs_them(random: torch.Generator) -> None:
    sizes = [2 * 3, 2 * 3, 4 * 5, 4 * 5]  # q, k, v, z
    packed = torch.randn(7, sum(sizes), generator=random)
    gates = torch.randn(7, 8, generator=random)
    mixed, z, b, a = layers.fused_qkvzba_split_reshape_cat_contiguous(packed, gates, 2, 4, 3, 5)
    assert torch.equal(mixed, packed[:, : sum(sizes[:3])])
    assert torch.equal(z, packed[:, sum(sizes[:3]) :].view(7, 4, 5))
    assert torch.equal(torch.cat([b, a], dim=1), gates)
    assert mixed.is_contiguous()


def test_gated_norm(random: torch.Generator) -> None:
    x, z = torch.randn(2, 12, 8, generator=random).unbind()
    norm = SimpleNamespace(
        weight=torch.randn(8, generator=random),
        eps=1e-6,
        norm_before_gate=True,
        group_size=None,
        activation="swish",
    )
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight * F.silu(z)
    torch.testing.assert_close(layers.gated_norm(norm, x, z), expected)


def test_gates_of_attention_and_of_the_shared_expert(random: torch.Generator) -> None:
    attention, gate = torch.randn(2, 5, 12, generator=random).unbind()
    expected = attention * gate.sigmoid()
    strided = torch.stack([gate.view(5, 3, 4), gate.view(5, 3, 4)], dim=2)[:, :, 0]
    torch.testing.assert_close(layers.fused_sigmoid_mul(attention, strided), expected)
    in_place = attention.clone()
    assert layers.fused_sigmoid_mul(in_place, gate, inplace=True) is in_place
    torch.testing.assert_close(in_place, expected)
    hidden, weight = torch.randn(5, 12, generator=random), torch.randn(12, generator=random)
    shared = attention * (hidden @ weight).sigmoid()[:, None]
    torch.testing.assert_close(layers.fused_gate_sigmoid_mul(hidden, weight, attention), shared)
    total = gate.clone()
    layers.fused_gate_sigmoid_mul_add(hidden, weight, attention, total)
    torch.testing.assert_close(total, gate + shared)
