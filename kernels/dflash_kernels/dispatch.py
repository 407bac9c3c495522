"""What every public op does before it runs: check its arguments, and choose a form of itself.

Shapes and dtypes are known on the host, so a check never waits for the device.
"""

import torch
from torch import Tensor

_triton_allowed = True


def use_reference() -> None:
    """Run the torch references on every device from now on, in this process."""
    global _triton_allowed
    _triton_allowed = False


def runs_triton(x: Tensor) -> bool:
    """Whether an op on `x` launches its kernel: on CUDA, unless `use_reference` was called."""
    return _triton_allowed and x.is_cuda


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
