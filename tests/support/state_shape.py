"""Recurrent states of Qwen3.6-35B-A3B, as SGLang describes them."""

from __future__ import annotations

from sglang.srt.configs.mamba_utils import Mamba2StateShape

from bench.memory.recurrent_state import QWEN36


def qwen36_state_shape() -> Mamba2StateShape:
    """Of one layer on one GPU."""
    return Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=QWEN36.heads * QWEN36.value_dim,
        n_groups=QWEN36.key_heads,
        num_heads=QWEN36.heads,
        head_dim=QWEN36.value_dim,
        state_size=QWEN36.key_dim,
        conv_kernel=QWEN36.window + 1,
    )
