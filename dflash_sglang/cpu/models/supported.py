"""Whether one of SGLang's modules computes the formula that ``layers`` or ``matmul`` computes."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.quantization.unquant import (
    UnquantizedFusedMoEMethod,
    UnquantizedLinearMethod,
)
from sglang.srt.layers.rotary_embedding import RotaryEmbedding

from dflash_sglang.cpu.matmul.linear_methods import CpuLinearMethod


def is_supported_linear(linear: Any) -> bool:
    """``x W^T + b`` with unquantised weights."""
    return type(linear.quant_method) in (UnquantizedLinearMethod, CpuLinearMethod)


def is_supported_norm(norm: Any) -> bool:
    """``x / rms(x) * weight`` over the whole last axis, in x's dtype."""
    return (
        type(norm) is RMSNorm
        and norm.has_weight
        and norm.variance_size_override is None
        and norm.override_orig_dtype is None
        and not norm.fp32_residual
        and not norm.cast_x_before_out_mul
    )


def is_supported_rotary(rotary: Any) -> bool:
    """NeoX-style rotation of the whole head, by a table of angles."""
    return (
        type(rotary) is RotaryEmbedding
        and rotary.is_neox_style
        and rotary.rotary_dim == rotary.head_size
    )


def is_supported_experts(experts: Any) -> bool:
    """Unquantised experts gated by SiLU, all on this rank, outputs scaled by router weights."""
    run = experts.moe_runner_config
    return (
        type(experts.quant_method) is UnquantizedFusedMoEMethod
        and not experts.quant_method.with_bias
        and experts.num_local_experts == experts.num_experts
        and run.activation == "silu"
        and run.is_gated
        and not run.apply_router_weight_on_input
        and not run.no_combine
        and run.gemm1_alpha is None
        and run.gemm1_clamp_limit is None
        and run.swiglu_limit is None
    )


def is_supported_router(topk: Any) -> bool:
    """The top k of a softmax over the experts, with or without renormalisation."""
    config = topk.topk_config
    return (
        config.scoring_func == "softmax"
        and not config.use_grouped_topk
        and config.correction_bias is None
        and config.custom_routing_function is None
        and config.routed_scaling_factor is None
        and config.num_shared_topk_slots == 0
    )
