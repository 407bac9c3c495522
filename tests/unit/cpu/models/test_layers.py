"""Norms, rotations and the gated MLP against their formulas in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dflash_sglang.cpu.models.layers import gated_mlp, rms_norm, rotary_tables, rotate, unit_norm

EPS = 1e-6


def norm_by_definition(x: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("shape", [(1, 256), (63, 100), (5, 6, 64), (0, 8)])
@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e4])
def test_rms_norm(shape: tuple[int, ...], scale: float) -> None:
    """Scale 1e-4 is where eps weighs as much as the mean square."""
    x, weight = torch.randn(shape) * scale, torch.randn(shape[-1])
    expected = norm_by_definition(x, EPS) * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, EPS).double(), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(
        unit_norm(x, EPS).double(), norm_by_definition(x, EPS), atol=1e-6, rtol=1e-5
    )


def test_rms_norm_of_zeros_is_zero() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), EPS), torch.zeros(2, 8))


def test_rms_norm_takes_statistics_of_bfloat16_in_float32() -> None:
    x, weight = torch.randn(7, 512).bfloat16(), torch.randn(512).bfloat16()
    out = rms_norm(x, weight, EPS)
    assert out.dtype == torch.bfloat16
    expected = norm_by_definition(x, EPS) * weight.double()
    # one rounding to eight bits, not an accumulation of them
    torch.testing.assert_close(out.double(), expected, atol=1e-3, rtol=2**-8)


def test_norm_of_a_strided_view() -> None:
    """Queries and keys are a slice of the projection."""
    qkv = torch.randn(5, 8, 64)
    out = unit_norm(qkv[:, :6], EPS)
    assert out.is_contiguous()
    torch.testing.assert_close(
        out.double(), norm_by_definition(qkv[:, :6], EPS), atol=1e-6, rtol=1e-5
    )


def test_rotation_turns_pairs_of_the_two_halves() -> None:
    dim, positions = 16, torch.tensor([0, 1, 5, 1000])
    frequency = 10000 ** -(torch.arange(0, dim, 2).double() / dim)
    angle = torch.arange(1024).double()[:, None] * frequency
    table = torch.cat((angle.cos(), angle.sin()), dim=-1).float()
    x = torch.randn(4, 3, dim)
    out = rotate(x, rotary_tables(table, positions)).double()
    pairs = torch.complex(x[..., : dim // 2].double(), x[..., dim // 2 :].double())
    turned = pairs * torch.polar(torch.ones_like(angle), angle)[positions][:, None]
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)


def test_gated_mlp() -> None:
    x, gate_up, down = torch.randn(7, 20), torch.randn(24, 20), torch.randn(20, 12)
    inner = F.silu(x @ gate_up[:12].T) * (x @ gate_up[12:].T)
    # products of 20 and 12 terms of size one
    torch.testing.assert_close(gated_mlp(x, gate_up, down), inner @ down.T, atol=1e-4, rtol=1e-4)
