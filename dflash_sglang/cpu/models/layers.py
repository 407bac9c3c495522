"""Norms, rotary embedding and gated MLP of a decoder layer, in as few torch calls as possible.

On a CPU a small model spends most of a step in call overhead. Values equal the textbook formulas up
to rounding; tests compare them in float64.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_sglang.cpu.matmul.gemm import linear


class RotaryTables(NamedTuple):
    """Rotary tables of a batch, shared by all layers of a forward."""

    cos: Tensor  # [tokens, 1, dim]
    sin: Tensor  # [tokens, 1, dim], the first half negated


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis.

    Args:
        x: [..., dim], float32 or lower; statistics are computed in float32.
        weight: [dim].
        eps: added to the mean square.

    Returns:
        A new contiguous tensor of x's shape and dtype.
    """
    if x.dtype == torch.float32:
        return (x * weight).div_(_root_mean_square(x, eps))
    return (x.float() * weight).div_(_root_mean_square(x, eps)).to(x.dtype)


def unit_norm(x: Tensor, eps: float) -> Tensor:
    """``rms_norm`` with a weight of 1, for weights that differ along another axis.

    Args:
        x: [..., dim], float32 or lower.
        eps: added to the mean square.

    Returns:
        A new contiguous tensor of x's shape and dtype.
    """
    return x.div(_root_mean_square(x, eps)).to(x.dtype)


def _root_mean_square(x: Tensor, eps: float) -> Tensor:
    """[..., 1] float32; by ``vector_norm``, because a mean costs twice the rest of the norm."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return torch.addcmul(_constant(eps), norm, norm, value=1 / x.shape[-1]).sqrt_()


@functools.cache
def _constant(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


def rotary_tables(cos_sin: Tensor, positions: Tensor) -> RotaryTables:
    """Look up the cosines and sines of every token.

    Args:
        cos_sin: [max_positions, dim], cosines of the dim / 2 frequencies, then their sines.
        positions: [tokens] int.

    Returns:
        Tables over the full head dimension, for NeoX-style rotation.
    """
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    return RotaryTables(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))


def rotate(x: Tensor, tables: RotaryTables) -> Tensor:
    """Rotate heads by their positions.

    Args:
        x: [tokens, heads, dim].
        tables: from ``rotary_tables``.

    Returns:
        A new tensor of x's shape and dtype.
    """
    swapped = torch.roll(x, x.shape[-1] // 2, dims=-1)  # swap the two halves
    return torch.addcmul(x * tables.cos, swapped, tables.sin)


def gated_mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """``(silu(x G^T) * (x U^T)) D^T``.

    Args:
        x: [tokens, dim].
        gate_up: [2 * intermediate, dim], G above U.
        down: [dim, intermediate].

    Returns:
        [tokens, dim].
    """
    gate, up = linear(x, gate_up).chunk(2, dim=-1)
    return linear(F.silu(gate).mul_(up), down)
