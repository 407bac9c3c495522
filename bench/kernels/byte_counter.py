"""Counts the bytes that torch ops read and write, on fake tensors."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# How often a kernel reads a row of 1 MB of float32, which fits no shared memory: assumed from how
# such kernels work, not measured.
PASSES: Mapping[str, float] = {
    "_softmax": 3,  # maximum, sum, result
    "topk": 5,  # radix select: four digits and the gathering
    "top_k_renorm": 5,  # maximum, three rounds of bisection, result
    "top_p_renorm": 12,  # maximum, ten rounds of bisection, result (2 to 23, by row)
    "top_k_top_p_sampling": 3,  # draw and test, 1.5 reads a round; two rounds (1 to 10, by row)
    "tree_sampling": 1.5,  # sum, then half of the cumulated row on average
}
# fmt: off
VIEWS = frozenset({
    "view", "_unsafe_view", "expand", "slice", "select", "unsqueeze", "squeeze", "detach", "alias",
    "t", "transpose", "empty", "empty_like", "new_empty", "lift_fresh", "as_strided", "reshape",
})
WRITE_ONLY = frozenset({
    "zeros", "zeros_like", "new_zeros", "full", "full_like", "fill_", "ones", "arange", "rand",
})
# fmt: on


class ByteCounter(TorchDispatchMode):
    """Adds up what every dispatched op reads and writes."""

    def __init__(self, passes: Mapping[str, float]) -> None:
        super().__init__()
        self.bytes = 0
        self._passes = passes

    def add(self, op: str, read: int, written: int) -> None:
        """Count one kernel, by name."""
        self.bytes += int(read * self._passes.get(op, 1)) + written

    def __torch_dispatch__(
        self, func: Any, types_: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        namespace, op = func._schema.name.split("::")
        if namespace != "aten" or op in VIEWS:
            return result
        read = sum(map(physical_bytes, tensors_in((args, kwargs))))
        written = sum(map(physical_bytes, tensors_in(result)))
        if op in WRITE_ONLY:
            read = 0
        elif op == "scatter_":  # touches what it scatters only
            read -= physical_bytes(args[0])
            written = physical_bytes(args[3])
        elif op in {"gather", "index"}:  # reads what it gathers only
            read += written - physical_bytes(args[0])
        self.add(op, read, written)
        return result


def physical_bytes(tensor: Tensor) -> int:
    """Bytes behind a tensor, each counted once however often a view repeats it."""
    sizes = [n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return torch.Size(sizes).numel() * tensor.element_size()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors in nested arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(tuple(value.values()))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for one in value:
            yield from tensors_in(one)
