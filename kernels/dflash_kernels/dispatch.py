"""Which form of an op runs: Triton on CUDA tensors, unless torch only was asked for."""

from torch import Tensor

_allowed = True


def use_reference() -> None:
    """Run the torch references on every device from now on, in this process."""
    global _allowed
    _allowed = False


def runs_triton(x: Tensor) -> bool:
    """Whether an op on `x` launches its Triton kernel."""
    return _allowed and x.is_cuda
