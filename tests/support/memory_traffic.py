"""Bytes that interpreted kernels load and store, counted at the interpreter."""

from collections.abc import Callable
from typing import Any
from unittest import mock

from triton.runtime.interpreter import InterpreterBuilder


def bytes_moved(run: Callable[[], Any]) -> int:
    """Bytes of all unmasked elements that `run` loads and stores."""
    moved = 0
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def count(pointers: Any, mask: Any) -> None:
        nonlocal moved
        moved += int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8

    def counted_load(self: Any, pointers: Any, mask: Any, *args: Any) -> Any:
        count(pointers, mask)
        return load(self, pointers, mask, *args)

    def counted_store(self: Any, pointers: Any, value: Any, mask: Any, *args: Any) -> Any:
        count(pointers, mask)
        return store(self, pointers, value, mask, *args)

    with (
        mock.patch.object(InterpreterBuilder, "create_masked_load", counted_load),
        mock.patch.object(InterpreterBuilder, "create_masked_store", counted_store),
    ):
        run()
    return moved
