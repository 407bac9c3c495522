"""Forwards for SGLang's fused ops, registered under the platform's dispatch key.

``BaseFusedOp.register_oot_forward`` is SGLang's extension point for a platform's ops: a registered
forward is used for exactly that class, and only while this platform is active. These forwards serve
the models that keep SGLang's model code, and workers that call a single norm or rotary embedding.
A configuration that a forward does not support goes to the op's native torch implementation.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.kernels.fused_op import BaseFusedOp
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from torch import Tensor

from dflash_sglang.cpu.matmul.expert_autotune import autotuned_variants, expert_weights
from dflash_sglang.cpu.matmul.experts import padded
from dflash_sglang.cpu.matmul.routed import routed_tokens
from dflash_sglang.cpu.models.layers import rms_norm, rotary_tables, rotate
from dflash_sglang.cpu.models.supported import (
    is_supported_experts,
    is_supported_norm,
    is_supported_rotary,
)


def register_ops(dispatch_key: str) -> None:
    """Register the forwards of this module.

    Args:
        dispatch_key: the platform's ``get_dispatch_key_name``.
    """
    BaseFusedOp.register_oot_forward(RMSNorm, norm_forward, dispatch_key)
    BaseFusedOp.register_oot_forward(RotaryEmbedding, rotary_forward, dispatch_key)
    BaseFusedOp.register_oot_forward(UnquantizedFusedMoEMethod, experts_forward, dispatch_key)


def norm_forward(
    norm: RMSNorm,
    x: Tensor,
    residual: Tensor | None = None,
    post_residual_addition: Tensor | None = None,
    quant_linear: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``RMSNorm.forward``: the norm of x, or of x + residual and that sum.

    Args:
        norm: the module.
        x: [..., dim].
        residual: as x; added to it first.
        post_residual_addition: as x; added too.
        quant_linear: unused, as in the native implementation.

    Returns:
        The normed tensor, and with a residual the sum.
    """
    supported = is_supported_norm(norm) and x.dtype == torch.float32
    if not supported or post_residual_addition is not None:
        return norm.forward_native(x, residual, post_residual_addition)
    if residual is None:
        return rms_norm(x, norm.weight, norm.variance_epsilon)
    total = x + residual
    return rms_norm(total, norm.weight, norm.variance_epsilon), total


def rotary_forward(
    rotary: RotaryEmbedding,
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    offsets: Tensor | None = None,
    fused_set_kv_buffer_arg: None = None,
) -> tuple[Tensor, Tensor]:
    """``RotaryEmbedding.forward``: queries and keys rotated by their positions.

    Args:
        rotary: the module.
        positions: [tokens] int.
        query: [tokens, heads * dim] or [tokens, heads, dim].
        key: as ``query``, with the key heads.
        offsets: added to the positions.
        fused_set_kv_buffer_arg: kernels only; None here.

    Returns:
        The rotated queries and keys, shaped as the inputs.
    """
    if not is_supported_rotary(rotary) or offsets is not None or not positions.numel():
        return rotary.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
    tables = rotary_tables(rotary.cos_sin_cache, positions.flatten())
    heads = (x.reshape(x.shape[0], x[0].numel() // rotary.head_size, -1) for x in (query, key))
    rotated_query, rotated_key = (rotate(x, tables) for x in heads)
    return rotated_query.view(query.shape), rotated_key.view(key.shape)


def experts_forward(
    method: UnquantizedFusedMoEMethod, layer: Any, dispatch_output: Any
) -> StandardCombineInput:
    """``UnquantizedFusedMoEMethod.forward``: routed experts, by the variant measured to be fastest.

    Args:
        method: the layer's method object.
        layer: the ``FusedMoE`` module.
        dispatch_output: hidden states [tokens, dim] and the router's output.

    Returns:
        The combined outputs [tokens, dim]; zeros for tokens that are routed to no expert.
    """
    tokens = len(dispatch_output.hidden_states)
    routed = routed_tokens(tokens)
    topk = type(dispatch_output.topk_output)(*(x[:routed] for x in dispatch_output.topk_output))
    hidden = dispatch_output.hidden_states[:routed]
    if not is_supported_experts(layer):
        given = dispatch_output._replace(hidden_states=hidden, topk_output=topk)
        out = method.forward_cpu(layer, given).hidden_states
    else:
        experts = expert_weights(layer)
        run = autotuned_variants(experts, topk.topk_ids.shape[1]).select(routed)
        out = run(hidden, experts, topk.topk_ids, topk.topk_weights)
    return StandardCombineInput(hidden_states=padded(out, tokens))
