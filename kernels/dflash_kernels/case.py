"""Cases: named regimes of an op, in each of which the kernel must give the reference's result.

Every op lists its own in `cases.py`, once: the self-test of a server start takes `for_server`,
`bench.gpu`, on a GPU, takes `CASES`, and the tests in Triton's interpreter take `CASES` and `GRID`.
"""

import importlib
import zlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
VOCABULARIES = (151_936, 248_320)  # of Qwen3 and Qwen3.6
FAR = 1 << 30  # elements between rows: two rows on, an index has passed 2**31

OPS = (
    "prepare_block",
    "accept_match",
    "draft_tail",
    "verify_bound",
    "accept_sampled",
    "accept_filtered",
    "context_kv",
    "block_verify",
)


class Inputs:
    """Random tensors, the same on every machine and device."""

    def __init__(self, device: torch.device | str, seed: int) -> None:
        self.device = torch.device(device)
        self.on_gpu = self.device.type == "cuda"
        self._generator = torch.Generator().manual_seed(seed)

    def floats(self, *shape: int, dtype: torch.dtype = FP32, scale: float = 1.0) -> Tensor:
        """Normally distributed."""
        values = scale * torch.randn(shape, generator=self._generator)
        return values.to(dtype).to(self.device)

    def uniforms(self, *shape: int) -> Tensor:
        """In [0, 1), float32."""
        return torch.rand(shape, generator=self._generator).to(self.device)

    def ids(self, high: int, *shape: int, low: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
        """Integers in low .. high-1."""
        values = torch.randint(low, high, shape, generator=self._generator, dtype=dtype)
        return values.to(self.device)

    def permutation(self, count: int) -> Tensor:
        """0 .. count-1, shuffled, int64."""
        return torch.randperm(count, generator=self._generator).to(self.device)

    def seeds(self, *shape: int) -> Tensor:
        """All of int64."""
        return self.ids(2**63 - 1, *shape, low=-(2**63))

    def each(self, *values: float, dtype: torch.dtype = FP32) -> Tensor:
        """These values."""
        return torch.tensor(values, dtype=dtype, device=self.device)


class Trial(NamedTuple):
    """A case with its inputs."""

    run: Callable[[ModuleType], Sequence[Tensor]]  # given the op's kernel.py or reference.py
    # Of the result: it is in the regime that the case is named after.
    holds: Callable[[Any], bool] = lambda _: True


class Case(NamedTuple):
    """One regime of an op."""

    name: str
    make: Callable[[Inputs], Trial]
    # Of floats on a GPU, relative to the larger of 1 and the reference's value.
    tolerance: float = 0.0
    large: bool = False  # takes gigabytes of GPU memory, or seconds in the interpreter

    def on(self, device: torch.device | str) -> Trial:
        """Make the inputs, on a device."""
        return self.make(Inputs(device, zlib.crc32(self.name.encode())))


def part_of(op: str, part: str) -> Any:
    """A module of an op: "kernel", "reference" or "cases"; a kernel needs triton."""
    return importlib.import_module(f"dflash_kernels.{op}.{part}")


def difference(got: Tensor, expected: Tensor) -> float:
    """The largest difference, relative above 1; infinite where shape, dtype or integers differ.

    NaN equals NaN and nothing else.
    """
    if (got.shape, got.dtype) != (expected.shape, expected.dtype):
        return float("inf")
    if not got.dtype.is_floating_point:
        return 0.0 if torch.equal(got, expected) else float("inf")
    if not got.numel():
        return 0.0
    ours, theirs = got.double(), expected.double()
    apart = (ours - theirs).abs() / theirs.abs().clamp(min=1)
    equal = (ours == theirs) | (ours.isnan() & theirs.isnan())  # infinities of one sign
    return float(apart.masked_fill(equal, 0.0).nan_to_num(nan=float("inf")).max())


def far_apart(rows: Tensor, dim: int = 0) -> Tensor:
    """The same values, `FAR` elements apart along one dimension: 32-bit addresses do not reach.

    On a CPU pages that are not written take no memory.
    """
    strides = list(rows.contiguous().stride())
    strides[dim] = FAR
    size = 1 + sum((n - 1) * stride for n, stride in zip(rows.shape, strides, strict=True))
    apart = untouched(size, rows.dtype, rows.device).as_strided(rows.shape, strides)
    return apart.copy_(rows)


def untouched(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of `size` elements that nothing fills: `torch.empty` does where tests poison it."""
    storage: Any = torch.UntypedStorage(size * dtype.itemsize, device=device)  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=dtype, device=device).set_(storage)


def name_of(dtype: torch.dtype) -> str:
    """bfloat16 instead of torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def padded(matrix: Tensor, columns: int, value: float = 99.0) -> Tensor:
    """The matrix as the valid columns of a wider one; the others must not be read."""
    *rows, valid = matrix.shape
    wide = matrix.new_full((*rows, valid + columns), value)
    wide[..., :valid] = matrix
    return wide[..., :valid]
