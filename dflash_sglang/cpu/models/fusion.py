"""Whether the fused decoder may replace a loaded model's forward, and its installation.

SGLang calls ``SRTPlatform.post_load_model`` to let a platform change a model in place. A model that
the fused decoder does not compute exactly keeps SGLang's forward, and one log line gives the
reason.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Iterator
from typing import Any

from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.models.dflash import DFlashDraftModel
from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM
from sglang.srt.runtime_context import get_exec, get_lora, get_observability, get_parallel
from torch import Tensor, nn

from dflash_sglang.cpu.matmul.expert_autotune import autotuned_variants, expert_weights
from dflash_sglang.cpu.models.decoder import drafter_forward, expert_mlp, qwen3_moe_forward
from dflash_sglang.cpu.models.supported import (
    is_supported_experts,
    is_supported_linear,
    is_supported_norm,
    is_supported_rotary,
    is_supported_router,
)

logger = logging.getLogger(__name__)


def lay_out_weights(model: nn.Module) -> None:
    """Change the memory layout of weights for products of few tokens; shapes and values stay.

    A matrix [out, in] is stored [in, out]: for 1 to 32 tokens its product then took 0.6 to 0.9 of
    the time on the machine it was measured on, weights in the last-level cache. The down
    projections of the experts are stored [experts, intermediate, dim], so that those of all experts
    are one matrix. Neither needs a second copy, and weights can still be updated in place.

    Args:
        model: the model just loaded; its unquantised matrices are changed in place.
    """
    for module in model.modules():
        if isinstance(module, LinearBase) and is_supported_linear(module):
            _store_transposed(module.weight)
        if isinstance(module, FusedMoE) and is_supported_experts(module):
            _store_transposed(module.w2_weight)


def _store_transposed(weight: Tensor) -> None:
    weight.data = weight.data.transpose(-2, -1).contiguous().transpose(-2, -1)


def install_decoder(model: nn.Module) -> None:
    """Replace the forward of a model that the fused decoder supports.

    Args:
        model: the model just loaded; changed in place when it qualifies.
    """
    name = type(model).__name__
    if type(model) not in (Qwen3MoeForCausalLM, DFlashDraftModel):
        logger.info("CPU platform: %s keeps SGLang's own forward", name)
        return
    reason = next(_obstacles(model), None)
    if reason:
        logger.info("CPU platform: %s keeps SGLang's own forward: %s", name, reason)
        return
    if type(model) is DFlashDraftModel:
        model.forward = types.MethodType(drafter_forward, model)
    else:
        stack: Any = model.model
        first = stack.layers[0].mlp.experts
        variants = autotuned_variants(expert_weights(first), first.moe_runner_config.top_k)
        logger.info("CPU platform: experts run %s (tokens)", variants)
        stack.forward = types.MethodType(qwen3_moe_forward(expert_mlp(variants)), stack)
    logger.info("CPU platform: %s runs the fused decoder", name)


def _obstacles(model: Any) -> Iterator[str]:
    """Yield the reasons to keep SGLang's forward."""
    parallel, exec_ = get_parallel(), get_exec()
    if max(parallel.tp_size, parallel.pp_size, parallel.attn_dp_size) > 1:
        yield "it is split over several ranks"
    if get_lora().enable_lora and type(model) is not DFlashDraftModel:  # which has no adapter
        yield "LoRA is on"
    if exec_.moe.enable_eplb or exec_.moe.expert_distribution_recorder_mode:
        yield "expert placement (EPLB) or the recording of expert use is on"
    if exec_.features.enable_return_routed_experts:
        yield "routed experts are returned"
    watch = get_observability()
    if watch.forward_hooks or watch.debug_tensor_dump_output_folder:
        yield "forward hooks or tensor dumps are on"
    if type(model) is DFlashDraftModel:
        for layer in model.layers:
            yield from _layer_obstacles(layer)
            yield from _dense_obstacles(layer)
    else:
        for layer in model.model.layers:
            yield from _layer_obstacles(layer)
            mlp = layer.mlp
            if not (is_supported_experts(mlp.experts) and is_supported_router(mlp.topk)):
                yield "its experts or its router have an unsupported option"


def _layer_obstacles(layer: Any) -> Iterator[str]:
    block = layer.self_attn
    if not (is_supported_linear(block.qkv_proj) and is_supported_linear(block.o_proj)):
        yield "its attention is quantised"
    norms = (layer.input_layernorm, layer.post_attention_layernorm, block.q_norm, block.k_norm)
    if not all(is_supported_norm(norm) for norm in norms):
        yield "a norm is not an RMS norm without options"
    if not is_supported_rotary(block.rotary_emb):
        yield "its rotary embedding is not the NeoX one over the whole head"


def _dense_obstacles(layer: Any) -> Iterator[str]:
    block, mlp = layer.self_attn, layer.mlp
    if block.v_scale is not None or block.attention_sink_bias is not None:
        yield "its attention scales values or has sinks"
    if not (is_supported_linear(mlp.gate_up_proj) and is_supported_linear(mlp.down_proj)):
        yield "its MLP is quantised"
    if type(mlp.act_fn) is not SiluAndMul:
        yield "its MLP is not gated by SiLU"
    if layer.attention_conv is not None or layer.mlp_conv is not None:
        yield "it convolves over the block"
