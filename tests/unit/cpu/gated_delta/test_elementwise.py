"""The elementwise kernels of a Qwen3.5 layer, against their formulas."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F

from dflash_sglang.cpu.gated_delta.elementwise import (
    fused_gate_sigmoid_mul,
    fused_gate_sigmoid_mul_add,
    fused_qkvzba_split_reshape_cat_contiguous,
    fused_sigmoid_mul,
    gated_norm,
)


def test_projections_are_split_where_sglang_packs_them(random: torch.Generator) -> None:
    sizes = [2 * 3, 2 * 3, 4 * 5, 4 * 5]  # q, k, v, z
    packed = torch.randn(7, sum(sizes), generator=random)
    gates = torch.randn(7, 8, generator=random)
    mixed, z, b, a = fused_qkvzba_split_reshape_cat_contiguous(packed, gates, 2, 4, 3, 5)
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
    torch.testing.assert_close(gated_norm(norm, x, z), expected)


def test_gates_of_attention_and_of_the_shared_expert(random: torch.Generator) -> None:
    attention, gate = torch.randn(2, 5, 12, generator=random).unbind()
    expected = attention * gate.sigmoid()
    strided = torch.stack([gate.view(5, 3, 4), gate.view(5, 3, 4)], dim=2)[:, :, 0]
    torch.testing.assert_close(fused_sigmoid_mul(attention, strided), expected)
    in_place = attention.clone()
    assert fused_sigmoid_mul(in_place, gate, inplace=True) is in_place
    torch.testing.assert_close(in_place, expected)
    hidden, weight = torch.randn(5, 12, generator=random), torch.randn(12, generator=random)
    shared = attention * (hidden @ weight).sigmoid()[:, None]
    torch.testing.assert_close(fused_gate_sigmoid_mul(hidden, weight, attention), shared)
    total = gate.clone()
    fused_gate_sigmoid_mul_add(hidden, weight, attention, total)
    torch.testing.assert_close(total, gate + shared)
