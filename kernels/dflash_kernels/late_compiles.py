"""Kernels that Triton compiles after a server's start, when requests wait for them."""

import ast
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from triton import knobs

PACKAGE = __name__.partition(".")[0]
Form = tuple[tuple[str, Any], ...]  # of each argument its type and what else is compiled in


class LateCompile(NamedTuple):
    """One compile, of our kernels or of any other in the process."""

    kernel: str  # module and function
    seconds: float  # that its launch waited; few where Triton's cache on disk had it
    reason: str | None  # what no form of the kernel before had; None: not one of ours

    @property
    def op(self) -> str:
        """The op that launched it, or the module that several ops share; of our kernels."""
        return self.kernel.split(".")[1]


def watch(report: Callable[[LateCompile], None]) -> None:
    """Report every compile in this process from now on; hooks that are set keep being called.

    A kernel that this process has launched in the same form is not compiled again, and costs
    nothing here.

    Args:
        report: called in the thread that launches, when the kernel is ready.
    """
    before, after = knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook
    begun: dict[str, float] = {}

    def begins(*, key: str, **given: Any) -> bool | None:
        begun[key] = time.perf_counter()
        return None if before is None else before(key=key, **given)

    def is_ready(*, key: str, fn: Any, compile: Any, **given: Any) -> bool | None:
        seconds = time.perf_counter() - begun.pop(key)
        name = f"{fn.module}.{fn.name}"
        reason = None
        if name.startswith(f"{PACKAGE}."):
            kernel = fn.jit_function
            forms, *_ = kernel.device_caches[compile["device"]]
            reason = what_is_new(kernel.arg_names, key, forms.keys() - {key})
        report(LateCompile(name, seconds, reason))
        return None if after is None else after(key=key, fn=fn, compile=compile, **given)

    knobs.runtime.jit_cache_hook = begins
    knobs.runtime.jit_post_compile_hook = is_ready


def what_is_new(names: Iterable[str], key: str, others: Iterable[str]) -> str:
    """The arguments in which a form differs from the one that is most like it.

    Args:
        names: of the kernel's arguments.
        key: Triton's, of the form: a list with a pair for each argument, then the options.
        others: keys of the forms that were compiled before.
    """
    form = form_of(key)
    differences = [
        [
            f"{name} is {_described(new)}, was {_described(old)}"
            for name, new, old in zip(names, form, form_of(other), strict=True)
            if new != old
        ]
        for other in others
    ]
    if not differences:
        return "its first launch"
    nearest = min(differences, key=len)
    return "; ".join(nearest) or "other launch options"


def form_of(key: str) -> Form:
    """What a kernel was specialised on, by Triton's key."""
    return tuple(ast.literal_eval(key[: key.index("]{") + 1]))


def _described(argument: tuple[str, Any]) -> str:
    kind, detail = argument
    if kind == "constexpr":
        return repr(detail)
    return f"a multiple of 16 ({kind})" if detail == "D" else kind
