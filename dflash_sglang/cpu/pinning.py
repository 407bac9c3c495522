"""Code of SGLang that pins memory, on a machine without an accelerator to pin it for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode


class NoPinning(TorchFunctionMode):
    """A mode in which tensors stay in pageable memory, whatever asks for another."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Called by torch for every function on a tensor, and for those that make one."""
        if func is Tensor.pin_memory:
            return args[0]
        kwargs = kwargs or {}
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


def without_pinning(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND hook on a function that pins memory unconditionally."""
    with NoPinning():
        return original(*args, **kwargs)
