"""Set up the scheduler process and each model before they serve."""

from __future__ import annotations

import functools
import os
from typing import Any, cast

from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.runtime_context import get_lora
from torch import nn

from dflash_sglang.cpu.activation import BACKEND
from dflash_sglang.cpu.attention.backend import CpuAttentionBackend, refuse_unsupported_attention
from dflash_sglang.cpu.hooks import apply_hooks
from dflash_sglang.cpu.matmul.linear_methods import install_linear_methods
from dflash_sglang.cpu.models.fusion import install_decoder, lay_out_weights
from dflash_sglang.cpu.ops import register_ops
from dflash_sglang.cpu.server_args import CONV_DTYPE
from dflash_sglang.cpu.threads import set_threads
from dflash_sglang.errors import PlatformError


@functools.cache
def prepare_process(dispatch_key: str) -> None:
    """Once per scheduler process: threads, hooks, attention backend, op forwards.

    Args:
        dispatch_key: under which SGLang looks for the platform's op forwards.
    """
    set_threads()
    apply_hooks()
    register_attention_backend(BACKEND)(CpuAttentionBackend)
    register_ops(dispatch_key)
    if get_lora().enable_lora:
        from dflash_sglang.cpu.lora import LORA_HOOKS

        apply_hooks(LORA_HOOKS)


def has_recurrent_layers(model: nn.Module) -> bool:
    """Whether some layer keeps a recurrent state instead of a KV cache."""
    return any(isinstance(module, RadixLinearAttention) for module in model.modules())


@functools.cache
def prepare_recurrent() -> None:
    """Once per scheduler process, for the first model with recurrent layers.

    Raises:
        PlatformError: the states of the convolutions, and what a verify records, would be rounded.
    """
    from dflash_sglang.cpu.gated_delta.hooks import RECURRENT_HOOKS

    dtype = os.environ.get(CONV_DTYPE)
    if dtype != "float32":
        raise PlatformError(
            f"{CONV_DTYPE} is {dtype!r}: on a CPU states of recurrent layers are float32. Unset it."
        )
    apply_hooks(RECURRENT_HOOKS)


def prepare_model(model: nn.Module) -> None:
    """Once per model: refuse unsupported attention, disable Triton, install the CPU forwards.

    Args:
        model: the model just loaded, changed in place.

    Raises:
        PlatformError: the model's attention is not served on a CPU.
    """
    refuse_unsupported_attention(model)
    if has_recurrent_layers(model):
        prepare_recurrent()
    for module in model.modules():
        if getattr(module, "use_table_qk_norm_rope", False):
            # it selects a Triton kernel for bfloat16 drafters
            cast(Any, module).use_table_qk_norm_rope = False
    lay_out_weights(model)
    install_linear_methods(model)
    install_decoder(model)
