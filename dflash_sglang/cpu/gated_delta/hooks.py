"""The hooks for models with recurrent layers, applied when one is loaded."""

from __future__ import annotations

from sglang.srt.plugins.hook_registry import HookType

from dflash_sglang.cpu.gated_delta import (
    conv_kernels,
    elementwise,
    replay,
    rule_kernels,
    state_copy,
)
from dflash_sglang.cpu.hooks import Hook
from dflash_sglang.cpu.pinning import without_pinning

_OPS = "sglang.kernels.ops"
_LINEAR = f"{_OPS}.attention.linear"
_STATES = f"{_OPS}.mamba.mamba_state_scatter_triton"


RECURRENT_HOOKS = (
    Hook(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_decode",
        without_pinning,
        HookType.AROUND,
        "plain decoding pins the mask of tracked states, which needs an accelerator",
    ),
    *(
        Hook(f"{module}.{name}", replacement, HookType.REPLACE, "a Triton kernel")
        for module, name, replacement in (
            (
                f"{_OPS}.mamba.causal_conv1d_triton",
                "causal_conv1d_fn",
                conv_kernels.causal_conv1d_fn,
            ),
            (
                f"{_OPS}.mamba.causal_conv1d_triton",
                "causal_conv1d_update",
                conv_kernels.causal_conv1d_update,
            ),
            (f"{_LINEAR}.fused_gdn_gating", "fused_gdn_gating", rule_kernels.fused_gdn_gating),
            (
                f"{_OPS}.attention.fla.chunk",
                "chunk_gated_delta_rule",
                rule_kernels.chunk_gated_delta_rule,
            ),
            (
                f"{_OPS}.attention.fla.fused_recurrent",
                "fused_recurrent_gated_delta_rule_packed_decode",
                rule_kernels.fused_recurrent_gated_delta_rule_packed_decode,
            ),
            (
                f"{_LINEAR}.fused_sigmoid_gating_recurrent",
                "fused_sigmoid_gating_delta_rule_update",
                rule_kernels.fused_sigmoid_gating_delta_rule_update,
            ),
            (
                f"{_LINEAR}.gdn_replayssm_spec_decode",
                "gdn_replayssm_spec_decode",
                replay.gdn_replayssm_spec_decode,
            ),
            (
                f"{_LINEAR}.gdn_replayssm_spec_decode",
                "commit_gdn_replayssm_spec",
                replay.commit_gdn_replayssm_spec,
            ),
            (
                f"{_LINEAR}.gdn_replayssm_spec_decode",
                "commit_gdn_replayssm_circular",
                replay.commit_gdn_replayssm_circular,
            ),
            (
                _STATES,
                "fused_conv_window_scatter_with_mask",
                state_copy.fused_conv_window_scatter_with_mask,
            ),
            (
                _STATES,
                "scatter_mamba_states_after_mtp_verify",
                state_copy.scatter_mamba_states_after_mtp_verify,
            ),
            (_STATES, "track_mamba_states_all_layers", state_copy.track_mamba_states_all_layers),
            (_STATES, "track_mamba_states_if_needed", state_copy.track_mamba_states_if_needed),
            (
                f"{_OPS}.attention.triton_gdn_fused_proj",
                "fused_qkvzba_split_reshape_cat_contiguous",
                elementwise.fused_qkvzba_split_reshape_cat_contiguous,
            ),
            (f"{_OPS}.attention.fla.layernorm_gated", "RMSNorm.forward", elementwise.gated_norm),
            (f"{_OPS}.elementwise.elementwise", "fused_sigmoid_mul", elementwise.fused_sigmoid_mul),
            (
                f"{_OPS}.elementwise.elementwise",
                "fused_gate_sigmoid_mul",
                elementwise.fused_gate_sigmoid_mul,
            ),
            (
                f"{_OPS}.elementwise.elementwise",
                "fused_gate_sigmoid_mul_add",
                elementwise.fused_gate_sigmoid_mul_add,
            ),
        )
    ),
)
