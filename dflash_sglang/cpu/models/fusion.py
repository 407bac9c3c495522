"""Whether the fused decoder may replace a loaded model's forward, and putting it there.

``SRTPlatform.post_load_model`` is where SGLang lets a platform change a model in place. A model
that is not exactly what the fused decoder computes keeps SGLang's forward, with one log line that
says why.
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

from dflash_sglang.cpu.matmul.expert_autotune import experts_of, forms_for
from dflash_sglang.cpu.models.decoder import drafter_forward, expert_mlp, qwen3_moe_forward
from dflash_sglang.cpu.models.supported import (
    is_plain_experts,
    is_plain_linear,
    is_plain_norm,
    is_plain_rotary,
    is_plain_router,
)

logger = logging.getLogger(__name__)


def lay_out_weights(model: nn.Module) -> None:
    """Store weights the way a CPU multiplies a few tokens by them; shapes and values stay.

    A matrix [out, in] is stored [in, out]: for 1 to 32 tokens its product then took 0.6 to 0.9 of
    the time on the machine it was measured on, weights coming from the last-level cache. The down
    projections of the experts are stored [experts, width, dim], so that those of all experts are
    one matrix. Neither needs a second copy, and loading new weights in place keeps working.

    Args:
        model: the model just loaded; its unquantised matrices are changed in place.
    """
    for module in model.modules():
        if isinstance(module, LinearBase) and is_plain_linear(module):
            _store_transposed(module.weight)
        if isinstance(module, FusedMoE) and is_plain_experts(module):
            _store_transposed(module.w2_weight)


def _store_transposed(weight: Tensor) -> None:
    weight.data = weight.data.transpose(-2, -1).contiguous().transpose(-2, -1)


def install_decoder(model: nn.Module) -> None:
    """Replace the forward of a model that the fused decoder computes.

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
        forms = forms_for(experts_of(first), first.moe_runner_config.top_k)
        logger.info("CPU platform: experts run %s (tokens)", forms)
        stack.forward = types.MethodType(qwen3_moe_forward(expert_mlp(forms)), stack)
    logger.info("CPU platform: %s runs the fused decoder", name)


def _obstacles(model: Any) -> Iterator[str]:
    """What keeps SGLang's forward in place, if anything."""
    parallel, exec_ = get_parallel(), get_exec()
    if max(parallel.tp_size, parallel.pp_size, parallel.attn_dp_size) > 1:
        yield "it is split over several ranks"
    if get_lora().enable_lora:
        yield "LoRA is on"
    if exec_.moe.enable_eplb or exec_.moe.expert_distribution_recorder_mode:
        yield "experts are moved or their use recorded"
    if exec_.features.enable_return_routed_experts:
        yield "routed experts are returned"
    watch = get_observability()
    if watch.forward_hooks or watch.debug_tensor_dump_output_folder:
        yield "its modules are watched"
    if type(model) is DFlashDraftModel:
        for layer in model.layers:
            yield from _layer_obstacles(layer)
            yield from _dense_obstacles(layer)
    else:
        for layer in model.model.layers:
            yield from _layer_obstacles(layer)
            if not (is_plain_experts(layer.mlp.experts) and is_plain_router(layer.mlp.topk)):
                yield "its experts or its router are not the plain ones"


def _layer_obstacles(layer: Any) -> Iterator[str]:
    block = layer.self_attn
    if not (is_plain_linear(block.qkv_proj) and is_plain_linear(block.o_proj)):
        yield "its attention is quantised"
    norms = (layer.input_layernorm, layer.post_attention_layernorm, block.q_norm, block.k_norm)
    if not all(is_plain_norm(norm) for norm in norms):
        yield "a norm is not a plain RMS norm"
    if not is_plain_rotary(block.rotary_emb):
        yield "its rotary embedding is not the plain one over the whole head"


def _dense_obstacles(layer: Any) -> Iterator[str]:
    block, mlp = layer.self_attn, layer.mlp
    if block.v_scale is not None or block.attention_sink_bias is not None:
        yield "its attention scales values or has sinks"
    if not (is_plain_linear(mlp.gate_up_proj) and is_plain_linear(mlp.down_proj)):
        yield "its MLP is quantised"
    if type(mlp.act_fn) is not SiluAndMul:
        yield "its MLP is not gated by SiLU"
    if layer.attention_conv is not None or layer.mlp_conv is not None:
        yield "it convolves over the block"
