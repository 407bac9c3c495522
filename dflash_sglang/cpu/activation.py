"""When the platform applies: only on a machine without an accelerator."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

# Our name in the group sglang.srt.platforms, the value of SGLANG_PLATFORM that selects us.
ENTRY_POINT = "dflash_cpu"
PLATFORM_CLASS = "dflash_sglang.cpu.platform:CpuPlatform"
BACKEND = "dflash_cpu"  # the attention backend's name, on the command line and in logs


def activate() -> str | None:
    """Entry point of the platform group.

    Returns:
        The platform class as ``module:name``, or None where the platform does not apply.
    """
    return None if inactive_reason(os.environ) else PLATFORM_CLASS


def register_choices() -> None:
    """Add the attention backend to SGLang's command-line choices, where the platform applies."""
    if activate() is None:
        return
    from sglang.srt.arg_groups import choices

    for known, add in (
        (choices.ATTENTION_BACKEND_CHOICES, choices.add_attention_backend_choices),
        (choices.DRAFT_ATTENTION_BACKEND_CHOICES, choices.add_draft_attention_backend_choices),
        (
            choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
            choices.add_deterministic_attention_backend_choices,
        ),
        (
            choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
            choices.add_radix_supported_deterministic_attention_backend_choices,
        ),
    ):
        if BACKEND not in known:
            add([BACKEND])


def inactive_reason(
    environment: Mapping[str, str], accelerator: Callable[[], str | None] | None = None
) -> str | None:
    """Why the platform must stay inactive.

    The cheapest checks come first: two environment variables, then torch's device queries.

    Args:
        environment: the process environment.
        accelerator: returns the name of the accelerator present, or None; ``find_accelerator`` by
            default.

    Returns:
        A clause with the reason, or None when the platform applies.
    """
    if environment.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return "SGLANG_USE_CPU_ENGINE=1 selects SGLang's own CPU engine"
    selected = environment.get("SGLANG_PLATFORM", "")
    if selected not in ("", ENTRY_POINT):
        return f"SGLANG_PLATFORM={selected} selects another platform"
    found = (accelerator or find_accelerator)()
    return f"this machine has an accelerator ({found})" if found else None


def find_accelerator() -> str | None:
    """Name the accelerator of this machine, by the queries of SGLang's own platform resolution.

    Returns:
        ``cuda``, ``rocm``, ``xpu``, ``npu``, ``musa`` or ``mps``; None on a machine without one.
    """
    import torch  # not at import: the two environment variables may already decide

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
