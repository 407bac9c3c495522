"""When the platform applies: only where nothing better does."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

# Our name in the group sglang.srt.platforms, the value of SGLANG_PLATFORM that selects us.
ENTRY_POINT = "dflash_cpu"


def inactive_reason(
    environment: Mapping[str, str], accelerator: Callable[[], str | None] | None = None
) -> str | None:
    """Why the platform must stay inactive.

    The order is cheapest first: two environment look-ups, then the questions SGLang itself asks of
    torch.

    Args:
        environment: the process environment.
        accelerator: names the accelerator present, or None; ``find_accelerator`` by default.

    Returns:
        One clause that says why, or None when the platform applies.
    """
    if environment.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return "SGLANG_USE_CPU_ENGINE=1 asks for SGLang's own CPU engine"
    selected = environment.get("SGLANG_PLATFORM", "")
    if selected not in ("", ENTRY_POINT):
        return f"SGLANG_PLATFORM={selected} selects another platform"
    found = (accelerator or find_accelerator)()
    return f"this machine has an accelerator ({found})" if found else None


def find_accelerator() -> str | None:
    """Name the accelerator of this machine the way SGLang's own platform resolution would find it.

    Returns:
        ``cuda``, ``rocm``, ``xpu``, ``npu``, ``musa`` or ``mps``; None on a machine without one.
    """
    if torch.cuda.is_available():
        return "rocm" if torch.version.hip else "cuda"
    if torch.xpu.is_available():
        return "xpu"
    npu = getattr(torch, "npu", None)  # torch_npu adds the attribute when it is imported
    if npu is not None and npu.is_available():
        return "npu"
    if getattr(torch.version, "musa", None) is not None:
        return "musa"
    if torch.backends.mps.is_available():
        return "mps"
    return None
