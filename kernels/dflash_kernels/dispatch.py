"""What every public op does before it runs: check its arguments, and choose a form of itself.

Shapes and dtypes are known on the host, so a check never waits for the device.
"""

from collections.abc import Callable, Sequence
from typing import Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

_triton_allowed = True


def use_reference() -> None:
    """Run the torch references on every device from now on, in this process."""
    global _triton_allowed
    _triton_allowed = False


def runs_triton(x: Tensor) -> bool:
    """Whether an op on `x` launches its kernel: on CUDA, unless `use_reference` was called."""
    return _triton_allowed and x.is_cuda


class LaunchOp(Generic[P, R]):
    """A kernel's launch, which is a custom op to all that trace it or only ask for shapes.

    The way through torch's dispatcher and a custom op's wrappers takes the host longer than the
    launch itself, so ordinary tensors do not take it.
    """

    def __init__(self, name: str, launch: Callable[P, R], mutates_args: Sequence[str]) -> None:
        """Registers it, for subclasses of `Tensor`: fake tensors, those of a trace.

        Args:
            name: namespace::op.
            launch: takes tensors first, and is annotated as `torch.library.custom_op` wants it.
            mutates_args: the tensors that it writes.
        """
        self._launch = launch
        self._op = torch.library.custom_op(name, launch, mutates_args=mutates_args)
        self.register_fake = self._op.register_fake

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Launch it."""
        if type(args[0]) is Tensor:
            return self._launch(*args, **kwargs)
        result: R = self._op(*args, **kwargs)
        return result


def launch_op(
    name: str, *, mutates_args: Sequence[str] = ()
) -> Callable[[Callable[P, R]], LaunchOp[P, R]]:
    """Decorator of a launch: see `LaunchOp`."""
    return lambda launch: LaunchOp(name, launch, mutates_args)


def check_shape(name: str, tensor: Tensor | None, *expected: int) -> None:
    """Refuse a tensor of another shape; an argument that was left out passes.

    Raises:
        ValueError: with the argument's name and both shapes.
    """
    if tensor is not None and tensor.shape != expected:
        raise ValueError(f"expected {name} of shape {expected}, got {tuple(tensor.shape)}")


def check_dtype(name: str, tensor: Tensor, *expected: torch.dtype) -> None:
    """Refuse a tensor of another dtype.

    Raises:
        TypeError: with the argument's name and the dtypes.
    """
    if tensor.dtype not in expected:
        wanted = " or ".join(map(str, expected))
        raise TypeError(f"expected {name} of dtype {wanted}, got {tensor.dtype}")
