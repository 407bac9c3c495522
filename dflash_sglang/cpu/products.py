"""Products with weights, by whichever of torch's two libraries is faster for so many tokens.

Torch multiplies float32 matrices with MKL, which uses half the vector width on processors that are
not Intel's; oneDNN, in the same wheel, uses all of it, but takes longer to begin. Measured on one
core of an AMD EPYC with AVX-512, microseconds for [tokens, 256] x [256, 1024], weights coming from
the last-level cache: MKL 18 / 67 / 106 / 1314, oneDNN with the weight laid out for it
24 / 36 / 60 / 568 at 1 / 8 / 16 / 256 tokens. Where the crossing lies, if there is one, is measured
at start for each shape.

The operator is the one that torch's own compiler emits for a frozen linear layer; it takes weights
in torch's layout too, then lays them out at every call.
"""

from __future__ import annotations

import functools
import weakref
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_sglang.cpu.timing import fastest

# Token counts tried, widest first: the narrowest at which oneDNN still wins is where it begins.
TOKEN_COUNTS = (64, 32, 16, 8, 4, 2)
NEVER = 1 << 62
GAIN = 0.95  # of MKL's time, below which oneDNN is worth another rounding than one token's
# Copies of weights in oneDNN's layout, in bytes: without one a product of 16 tokens gains half as
# much, and one of 256 nearly the same.
MAX_COPIES = 1 << 30


class Weight(NamedTuple):
    """What is known of one weight."""

    ref: weakref.ref[Tensor]
    copy: Tensor | None  # in oneDNN's layout
    begin: int  # tokens from which on oneDNN is faster


_weights: dict[int, Weight] = {}
_begins: dict[tuple[object, ...], int] = {}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x W^T + b``, up to rounding `torch.nn.functional.linear`.

    Args:
        x: [..., in].
        weight: [out, in], of any strides. It is remembered: after a change in place call `refresh`.
        bias: [out].

    Returns:
        [..., out], contiguous.
    """
    known = _weights.get(id(weight)) or remember(weight)
    tokens = x.numel() // x.shape[-1] if x.ndim != 2 else x.shape[0]
    if tokens < known.begin:
        return F.linear(x, weight, bias)
    stored = weight if known.copy is None else known.copy
    rows = rounded(tokens)
    if rows == tokens:
        return _onednn(x, stored, bias)
    padded = x.new_empty(rows, x.shape[-1])
    padded[:tokens] = x.reshape(tokens, -1)
    return _onednn(padded, stored, bias)[:tokens].view(*x.shape[:-1], -1)


def _onednn(x: Tensor, stored: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, stored, bias, "none", [], "")


def rounded(tokens: int) -> int:
    """Rows that a product of so many tokens is given.

    oneDNN generates code for every number of rows, a third of a millisecond each, and keeps what it
    generated last: a server would otherwise meet every length a prompt can have.

    Args:
        tokens: at least 1.
    """
    if tokens <= 32:
        return tokens
    step = 8 if tokens <= 128 else 16 if tokens <= 256 else 64
    return -(-tokens // step) * step


def remember(weight: Tensor, *, copy: bool = True) -> Weight:
    """Measure where oneDNN begins to win for this weight, and lay it out for it.

    Args:
        weight: [out, in].
        copy: whether it may be copied into oneDNN's layout.

    Returns:
        What `linear` goes by; the same measurement for equal shapes and strides.
    """
    laid_out, begin = None, NEVER
    if _served(weight):
        with torch.inference_mode():
            if copy and weight.nbytes + _copied() <= MAX_COPIES:
                laid_out = _lay_out(weight)
            shape = (weight.shape, weight.stride(), laid_out is None, torch.get_num_threads())
            if shape not in _begins:
                _begins[shape] = measure_begin(weight, weight if laid_out is None else laid_out)
        begin = _begins[shape]
    key = id(weight)
    ref = weakref.ref(weight, lambda _: _weights.pop(key, None))
    _weights[key] = Weight(ref, None if begin == NEVER else laid_out, begin)
    return _weights[key]


def _served(weight: Tensor) -> bool:
    return (
        weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and weight.ndim == 2
        and torch._C._has_mkldnn
    )


def _copied() -> int:
    """Bytes of all copies."""
    counted = 0
    for known in _weights.values():
        weight = known.ref()
        counted += 0 if weight is None or known.copy is None else weight.nbytes
    return counted


def _lay_out(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach())


def measure_begin(weight: Tensor, stored: Tensor) -> int:
    """The token count from which on oneDNN is faster.

    Args:
        weight: [out, in] float32.
        stored: what oneDNN reads in its place.

    Returns:
        One of `TOKEN_COUNTS`, or `NEVER`.
    """
    begin = NEVER
    for tokens in TOKEN_COUNTS:
        x = torch.ones(tokens, weight.shape[1])
        limit = GAIN * fastest(functools.partial(F.linear, x, weight))
        if fastest(functools.partial(_onednn, x, stored, None)) > limit:
            break
        begin = tokens
    return begin


@torch.inference_mode()
def refresh() -> None:
    """Copy the weights again that were copied: some have changed in place."""
    for key, known in list(_weights.items()):
        weight = known.ref()
        if weight is not None and known.copy is not None:
            _weights[key] = known._replace(copy=_lay_out(weight))
