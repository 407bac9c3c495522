"""Which forms of a kernel Triton compiles, found by Triton itself, for a GPU that is not here.

A stand-in for Triton's driver names the GPU; `JITFunction.run` then binds the arguments of a
launch, specialises on them and looks the form up as it does on a GPU. Nothing is launched.
"""

from __future__ import annotations

import itertools
import resource
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast
from unittest import mock

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

HOPPER = 90


class Specialisation(NamedTuple):
    """One compiled form of a kernel."""

    kernel: str  # its module and name
    key: str  # Triton's own: types, constants and divisibility of the arguments, and options

    @property
    def op(self) -> str:
        """The folder of the op, or the module that several share."""
        return self.kernel.removeprefix("dflash_kernels.").split(".")[0]


class Compile(NamedTuple):
    """What a specialisation costs when no cache has it."""

    what: Specialisation
    cpu_seconds: float  # Python, LLVM and ptxas


class NamedDriver:
    """Tells Triton which GPU there is, and of its parts only that."""

    _numbers = itertools.count()

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)
        # Kernels keep their compiled forms by it: a new one has none, and none of a real device.
        self._device = f"named {next(self._numbers)}"

    def get_current_target(self) -> GPUTarget:
        """The GPU that is compiled for."""
        return self._target

    def get_current_device(self) -> str:
        """One that has compiled nothing."""
        return self._device

    def get_current_stream(self, device: object) -> int:
        """The default one."""
        return 0


@contextmanager
def named_gpu(arch: int = HOPPER) -> Iterator[None]:
    """Let Triton compile for an architecture, as if such a GPU were the current device."""
    active = driver._active  # the driver of a GPU, if there is one
    driver.set_active(cast(Any, NamedDriver(arch)))
    try:
        with warnings.catch_warnings():
            # The address of a fake tensor is its offset, which is what its alignment depends on.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            yield
    finally:
        driver._active = active


@contextmanager
def looked_up(found: set[Specialisation], arch: int = HOPPER) -> Iterator[None]:
    """Collect what every launch in here would run; nothing is compiled or launched."""

    def found_one(*, key: str, fn: Any, **_: Any) -> bool:
        found.add(Specialisation(f"{fn.module}.{fn.name}", key))
        return True  # Triton then neither compiles nor launches

    with named_gpu(arch), mock.patch.object(knobs.runtime, "jit_cache_hook", found_one):
        yield


@contextmanager
def compiled(found: list[Compile], arch: int = HOPPER) -> Iterator[None]:
    """Compile what every launch in here would run, each form once; nothing is launched.

    What Triton's cache on disk has is not compiled again: name an empty folder by TRITON_CACHE_DIR.
    """
    begin = 0.0
    run = JITFunction.run

    def starts(**_: Any) -> None:
        nonlocal begin
        begin = _cpu_seconds()

    def ends(*, key: str, fn: Any, **_: Any) -> None:
        what = Specialisation(f"{fn.module}.{fn.name}", key)
        found.append(Compile(what, _cpu_seconds() - begin))

    def warm_up(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(kernel, *args, grid=grid, warmup=True, **options)

    with (
        named_gpu(arch),
        mock.patch.object(knobs.runtime, "jit_cache_hook", starts),
        mock.patch.object(knobs.runtime, "jit_post_compile_hook", ends),
        mock.patch.object(JITFunction, "run", warm_up),
    ):
        yield


def _cpu_seconds() -> float:
    """Of this process and of those that it started and that ended: ptxas."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)
