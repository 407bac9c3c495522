"""LoRA adapters by SGLang's torch backend, which runs anywhere but pins memory.

Attention and embedding adapters are served. SGLang applies those of experts by Triton kernels, and
its torch backend leaves out which rows of a prompt reach the LM head: both are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.lora.backend.torch_backend import TorchNativeLoRABackend
from sglang.srt.lora.layers import FusedMoEWithLoRA
from sglang.srt.plugins.hook_registry import HookType

from dflash_sglang.cpu.hooks import Hook
from dflash_sglang.cpu.pinning import without_pinning
from dflash_sglang.errors import PlatformError

_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_PINS = "adapters are pinned in memory, which needs an accelerator"


def init_manager(original: Callable[[Any], None], model_runner: Any) -> None:
    """AROUND hook on ``ModelRunner.init_lora_manager``: adapters that a CPU can apply, or an error.

    Raises:
        PlatformError: another backend than torch's, or targets that it does not serve.
    """
    without_pinning(original, model_runner)
    refuse_unsupported(model_runner.lora_manager)


def refuse_unsupported(manager: Any) -> None:
    """Refuse what SGLang's torch backend does not apply, or applies to other rows.

    Args:
        manager: SGLang's `LoRAManager`, adapters wrapped around the model.

    Raises:
        PlatformError: see above.
    """
    backend = manager.lora_backend
    targets = ", ".join(sorted(manager.target_modules))
    if type(backend) is not TorchNativeLoRABackend:
        raise PlatformError(
            f"--lora-backend (given: {backend.name}) needs an accelerator. On a CPU leave it out, "
            "or give torch_native."
        )
    if any(isinstance(module, FusedMoEWithLoRA) for module in manager.base_model.modules()):
        raise PlatformError(
            f"LoRA on experts (targets: {targets}) runs by Triton kernels, which a CPU has not. "
            "Leave gate_proj, up_proj and down_proj out of --lora-target-modules and of the "
            "adapters in --lora-paths."
        )
    if manager.lm_head_module is not None:
        raise PlatformError(
            f"LoRA on lm_head (targets: {targets}): SGLang's torch backend takes the last tokens "
            "of several prompts for the first tokens of one. Leave lm_head out of "
            "--lora-target-modules and of the adapters in --lora-paths."
        )


LORA_HOOKS = (
    Hook(f"{_RUNNER}.init_lora_manager", init_manager, HookType.AROUND, _PINS),
    Hook(f"{_RUNNER}.load_lora_adapter", without_pinning, HookType.AROUND, _PINS),
    Hook(f"{_RUNNER}.load_lora_adapter_from_tensors", without_pinning, HookType.AROUND, _PINS),
    Hook(
        "sglang.srt.lora.lora_manager.LoRAManager.prepare_lora_batch",
        without_pinning,
        HookType.AROUND,
        "the adapters of a batch are pinned in memory, which needs an accelerator",
    ),
)
