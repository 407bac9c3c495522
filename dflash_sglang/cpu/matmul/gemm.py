"""``linear``: x W^T + b by MKL or oneDNN, whichever is faster for the number of tokens.

Torch multiplies float32 matrices with MKL, which uses half the vector width on processors that are
not Intel's. oneDNN, in the same wheel, uses all of it but has a higher cost per call. Measured on
one core of an AMD EPYC with AVX-512, microseconds for [tokens, 256] x [256, 1024], weights in the
last-level cache:

| tokens                 |  1 |  8 |  16 |  256 |
|------------------------|----|----|-----|------|
| MKL                    | 18 | 67 | 106 | 1314 |
| oneDNN, packed weight  | 24 | 36 |  60 |  568 |

The crossover, if there is one, is measured for each weight shape when a weight is registered.

The oneDNN operator is the one that torch's own compiler emits for a frozen linear layer. It also
takes weights in torch's layout, and then packs them at every call.
"""

from __future__ import annotations

import functools
import weakref
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_sglang.cpu.matmul.autotune import NEVER, crossover_tokens

# Bytes of weights that are kept a second time, packed for oneDNN. Without a packed weight a product
# of 16 tokens gains half as much, and one of 256 nearly the same.
MAX_PACKED_BYTES = 1 << 30


class RegisteredWeight(NamedTuple):
    """How to multiply by one weight."""

    ref: weakref.ref[Tensor]
    packed: Tensor | None  # in oneDNN's layout
    crossover: int  # tokens from which on oneDNN is faster


class WeightRegistry(dict[int, RegisteredWeight]):
    """Registered weights by ``id``; an entry is removed when its weight is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.packed_bytes = 0
        self.crossovers: dict[tuple[object, ...], int] = {}  # measured, by shape

    def add(self, weight: Tensor, packed: Tensor | None, crossover: int) -> RegisteredWeight:
        """Add a weight and count the bytes of its packed copy."""
        key, size = id(weight), 0 if packed is None else weight.nbytes
        self.packed_bytes += size
        ref = weakref.ref(weight, lambda _: self._remove(key, size))
        self[key] = RegisteredWeight(ref, packed, crossover)
        return self[key]

    def _remove(self, key: int, size: int) -> None:
        del self[key]
        self.packed_bytes -= size


_registry = WeightRegistry()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x W^T + b``; equal to `torch.nn.functional.linear` up to rounding.

    Args:
        x: [..., in].
        weight: [out, in], of any strides. Registered on first use; call `repack_weights` after a
            change in place.
        bias: [out].

    Returns:
        [..., out], contiguous.
    """
    entry = _registry.get(id(weight)) or register_weight(weight)
    tokens = x.numel() // x.shape[-1] if x.ndim != 2 else x.shape[0]
    if tokens < entry.crossover:
        return F.linear(x, weight, bias)
    packed = weight if entry.packed is None else entry.packed
    rows = padded_rows(tokens)
    if rows == tokens:
        return _onednn_linear(x, packed, bias)
    padded = x.new_empty(rows, x.shape[-1])
    padded[:tokens] = x.reshape(tokens, -1)
    return _onednn_linear(padded, packed, bias)[:tokens].view(*x.shape[:-1], -1)


def _onednn_linear(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")


def padded_rows(tokens: int) -> int:
    """Number of rows to which oneDNN's input is padded.

    oneDNN generates code for every number of rows, a third of a millisecond each, and keeps only
    the most recent. Without padding a server would generate code for every prompt length.

    Args:
        tokens: at least 1.
    """
    if tokens <= 32:
        return tokens
    step = 8 if tokens <= 128 else 16 if tokens <= 256 else 64
    return -(-tokens // step) * step


def register_weight(weight: Tensor) -> RegisteredWeight:
    """Measure a weight's crossover and pack it for oneDNN.

    Args:
        weight: [out, in]; packed into a second copy up to ``MAX_PACKED_BYTES`` for all weights.

    Returns:
        The entry that `linear` uses; weights of equal shape and strides share one measurement.
    """
    entry = _registry.get(id(weight))
    if entry is not None:
        return entry
    if not _onednn_supports(weight):
        return _registry.add(weight, None, NEVER)
    pack = _registry.packed_bytes + weight.nbytes <= MAX_PACKED_BYTES
    shape = (weight.shape, weight.stride(), pack, torch.get_num_threads())
    with torch.inference_mode():
        if shape not in _registry.crossovers:
            _registry.crossovers[shape] = measure_crossover(
                weight, _pack(weight) if pack else weight
            )
        crossover = _registry.crossovers[shape]
        packed = _pack(weight) if pack and crossover != NEVER else None
    return _registry.add(weight, packed, crossover)


def _onednn_supports(weight: Tensor) -> bool:
    return (
        weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and weight.ndim == 2
        and torch._C._has_mkldnn
    )


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach())


def measure_crossover(weight: Tensor, packed: Tensor) -> int:
    """The token count from which on oneDNN is faster than MKL for a weight.

    Args:
        weight: [out, in] float32.
        packed: the weight as oneDNN reads it, packed or not.

    Returns:
        As `autotune.crossover_tokens`.
    """
    return crossover_tokens(
        functools.partial(F.linear, weight=weight),
        functools.partial(_onednn_linear, packed=packed),
        weight.shape[1],
    )


@torch.inference_mode()
def repack_weights() -> None:
    """Pack again every packed weight that is still alive, after an update in place."""
    for key, entry in list(_registry.items()):
        weight = entry.ref()
        if weight is not None and entry.packed is not None:
            _registry[key] = entry._replace(packed=_pack(weight))
