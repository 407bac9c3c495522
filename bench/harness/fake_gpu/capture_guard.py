"""What a decode step dispatches, and what would break when it is captured, replayed or overlapped.

The step runs on fake CUDA tensors, beside real ones on the host: nothing is computed, every op is
seen. Streams and events, allocations by libraries and the inside of a custom op are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode

from bench.kernels.byte_counter import tensors_in

BATCHES = (1, 4, 64)
# Sections: what the worker runs itself, what is folded into the draft's graph, planning attention
# before both forwards, what the scheduler does with the new lengths.
SECTIONS = STEP, GRAPH, PLAN, SCHEDULER = "step", "draft graph", "attention plan", "scheduler"

# fmt: off
# Their result is read by the host, or its shape is.
READS = frozenset({
    "_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "nonzero_numpy",
    "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount", "histc",
})
# They launch nothing: allocations and questions.
SILENT = frozenset({
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "device",
    "record_stream", "lift_fresh",
})
# fmt: on


class CaptureError(AssertionError):
    """An op that a captured or overlapped step must not contain."""


class Dispatched(NamedTuple):
    """One op on the device."""

    section: str  # of the step it belongs to
    op: str  # namespace::name


class CaptureGuard(TorchDispatchMode):
    """Records the device's ops by section and refuses host reads and copies between devices."""

    def __init__(self, *, strict: bool = True) -> None:
        """Makes a guard.

        Args:
            strict: raise; otherwise list what would be refused in `refused`.
        """
        super().__init__()
        self.dispatched: list[Dispatched] = []
        self.refused: list[str] = []
        self._strict = strict
        self._section = STEP

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Ops in here belong to another part of the step."""
        outer, self._section = self._section, name
        yield
        self._section = outer

    def ops(self, section: str) -> list[str]:
        """The ops of a section, in order."""
        return [one.op for one in self.dispatched if one.section == section]

    def launch(self, op: str) -> None:
        """Count a kernel that is launched past the dispatcher."""
        self.dispatched.append(Dispatched(self._section, op))

    def kernel(self, name: str) -> Kernel:
        """Stands for such a kernel."""
        return Kernel(self, name)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = list(tensors_in((args, kwargs)))
        asked = {one.type for one in (*args, *kwargs.values()) if isinstance(one, torch.device)}
        if "cuda" not in asked | {one.device.type for one in given}:
            if any(isinstance(one, FakeTensor) for one in given):
                return func(*args, **kwargs)
            with unset_fake_temporarily():  # the host's own arithmetic is real
                return func(*args, **kwargs)
        problem = _problem(func, args, given, asked)
        if problem is not None:
            self.refused.append(problem)
            if self._strict:
                raise CaptureError(problem)
        try:
            result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise CaptureError(f"{func} reads the device") from error
        name = func._schema.name
        if name.split("::")[1] not in SILENT and not _is_view(func, given, result):
            self.launch(name)
        return result


class Kernel:
    """A kernel that is counted, not launched."""

    def __init__(self, guard: CaptureGuard, name: str) -> None:
        self._guard = guard
        self._name = name

    def __getitem__(self, grid: Any) -> Kernel:
        return self

    def __call__(self, *_: Any, **__: Any) -> None:
        """Count a launch."""
        self._guard.launch(self._name)


def _is_view(func: Any, given: Sequence[Tensor], result: Any) -> bool:
    """Whether all that came of an op is memory it was given, unwritten."""
    if func._schema.is_mutable:
        return False
    known = {one.untyped_storage()._cdata for one in given}
    made = list(tensors_in(result))
    return bool(made) and all(one.untyped_storage()._cdata in known for one in made)


def _problem(
    func: Any, args: Sequence[Any], given: Sequence[Tensor], asked: set[str]
) -> str | None:
    """Why the device or the host would have to wait, None if neither would."""
    name = func._schema.name.split("::")[1]
    if name in READS:
        return f"{func} reads the device"
    if name in {"index", "index_put", "index_put_"} and any(
        one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1]
    ):
        return f"{func} by a mask has a shape that depends on data"
    # A number on the host may go along with an op's arguments; a copy of it may not.
    copies = asked or name == "copy_"
    devices = {one.device.type for one in given if one.dim() or copies}
    if given and len(devices | asked) > 1:
        return f"{func} moves data between host and device"
    return None


def check_step(
    step: Callable[[int], CaptureGuard], statics: Callable[[], Mapping[str, Tensor]]
) -> list[str]:
    """Run a step at several batch sizes and compare.

    Args:
        step: runs one step at a batch size, under a guard that it returns.
        statics: tensors whose memory captured graphs know.

    Returns:
        The ops of the step, which are the same at every batch size.

    Raises:
        CaptureError: a host read or a copy in between, a static tensor that is another one after
            the step, or ops that depend on the batch size.
    """
    before = {name: one.untyped_storage()._cdata for name, one in statics().items()}
    sequences = {}
    for batch in BATCHES:
        guard = step(batch)
        # A graph is captured for each batch size: in there they may differ.
        sequences[batch] = [one for one in guard.dispatched if one.section != GRAPH]
        for name, one in statics().items():
            if one.untyped_storage()._cdata != before[name]:
                raise CaptureError(f"{name} is another tensor after a step")
        if sequences[batch] != sequences[BATCHES[0]]:
            raise CaptureError(f"other ops at batch {batch} than at batch {BATCHES[0]}")
    return [one.op for one in sequences[BATCHES[0]] if one.section == STEP]
