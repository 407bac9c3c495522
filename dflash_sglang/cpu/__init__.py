"""An out-of-tree SGLang platform for machines without an accelerator.

SGLang 0.5.23 serves on a CPU only through kernels that its wheel does not contain. This package
supplies what is missing in torch: an attention backend, KV pools without Triton, allocation
look-ups, MoE and norm forwards. SGLang finds it through two entry points; nothing of SGLang's is
edited.

* ``activate`` (group ``sglang.srt.platforms``) names the platform class, or None where the machine
  has an accelerator or somebody chose another platform;
* ``register_choices`` (called by the plugin) adds the name of the attention backend to SGLang's
  command line.

Both run in every process of a server, so neither imports anything heavy.
"""

from __future__ import annotations

import os

BACKEND = "dflash_cpu"  # the attention backend's name, on the command line and in logs
PLATFORM_CLASS = "dflash_sglang.cpu.platform:CpuPlatform"


def activate() -> str | None:
    """Entry point of the platform group.

    Returns:
        The platform class as ``module:name``, or None when the platform must stay out of the way.
    """
    from dflash_sglang.cpu.activation import inactive_reason

    return None if inactive_reason(os.environ) else PLATFORM_CLASS


def register_choices() -> None:
    """Add the attention backend to SGLang's choices, where the platform applies."""
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
