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

from dflash_sglang.cpu.matmul.timing import fastest

# Token counts tried, widest first: the narrowest at which oneDNN still wins is where it begins.
TOKEN_COUNTS = (64, 32, 16, 8, 4, 2)
NEVER = 1 << 62
GAIN = 0.95  # oneDNN wins where it takes less than this share of MKL's time
# Copies of weights in oneDNN's layout, in bytes: without one a product of 16 tokens gains half as
# much, and one of 256 nearly the same.
MAX_COPIES = 1 << 30


class Weight(NamedTuple):
    """What is known of one weight."""

    ref: weakref.ref[Tensor]
    copy: Tensor | None  # in oneDNN's layout
    begin: int  # tokens from which on oneDNN is faster


class Weights(dict[int, Weight]):
    """By the weight's id, as long as it lives."""

    def __init__(self) -> None:
        super().__init__()
        self.copied = 0  # bytes
        self.begins: dict[tuple[object, ...], int] = {}  # measured, by shape

    def add(self, weight: Tensor, copy: Tensor | None, begin: int) -> Weight:
        """Know a weight."""
        key, size = id(weight), 0 if copy is None else weight.nbytes
        self.copied += size
        self[key] = Weight(weakref.ref(weight, lambda _: self._drop(key, size)), copy, begin)
        return self[key]

    def _drop(self, key: int, size: int) -> None:
        del self[key]
        self.copied -= size


_weights = Weights()


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


def remember(weight: Tensor) -> Weight:
    """Measure where oneDNN begins to win for a new weight, and lay it out for it.

    Args:
        weight: [out, in]; copied into oneDNN's layout unless copies take too much already.

    Returns:
        What `linear` goes by; the same measurement for equal shapes and strides.
    """
    known = _weights.get(id(weight))
    if known is not None:
        return known
    if not _served(weight):
        return _weights.add(weight, None, NEVER)
    copy = _weights.copied + weight.nbytes <= MAX_COPIES
    shape = (weight.shape, weight.stride(), copy, torch.get_num_threads())
    with torch.inference_mode():
        if shape not in _weights.begins:
            stored = _lay_out(weight) if copy else weight
            _weights.begins[shape] = measure_begin(weight, stored)
        begin = _weights.begins[shape]
        laid_out = _lay_out(weight) if copy and begin != NEVER else None
    return _weights.add(weight, laid_out, begin)


def _served(weight: Tensor) -> bool:
    return (
        weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and weight.ndim == 2
        and torch._C._has_mkldnn
    )


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
