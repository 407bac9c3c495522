"""What the scheduler process needs before it serves."""

from __future__ import annotations

import functools
from typing import Any, cast

from sglang.srt.layers.attention.attention_registry import register_attention_backend
from torch import nn

from dflash_sglang.cpu import BACKEND
from dflash_sglang.cpu.attention_backend import CpuAttentionBackend, refuse_unserved_attention
from dflash_sglang.cpu.fusion import install_decoder, lay_out_weights
from dflash_sglang.cpu.hooks import apply_hooks
from dflash_sglang.cpu.ops import register_ops
from dflash_sglang.cpu.threads import set_threads


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


def prepare_model(model: nn.Module) -> None:
    """Once per model: refuse what would be wrong, turn off Triton, install the fused decoder.

    Args:
        model: the model just loaded, changed in place.

    Raises:
        PlatformError: the model's attention is not served on a CPU.
    """
    refuse_unserved_attention(model)
    for module in model.modules():
        if getattr(module, "use_table_qk_norm_rope", False):
            # a Triton kernel that a bfloat16 drafter would take
            cast(Any, module).use_table_qk_norm_rope = False
    lay_out_weights(model)
    install_decoder(model)
