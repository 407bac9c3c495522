"""The drafter's layers side by side, so that one product and one launch write all their KV."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from dflash_kernels.types import LayerCaches
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.models.dflash import DFlashDraftModel
from sglang.srt.speculative.dflash_utils import can_dflash_slice_qkv_weight
from torch import Tensor

FP8 = torch.float8_e4m3fn
CACHE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, FP8)


class LayerStack(NamedTuple):
    """What `dflash_kernels.context_kv` needs of all layers.

    A copy of the drafter's key and value projections: 2 * layers * kv_size * hidden elements.
    """

    method: Any  # SGLang's way of multiplying by the drafter's projections
    weight: Tensor  # [layers * 2 * kv_heads * head_dim, hidden], of each layer keys, then values
    bias: Tensor | None  # [layers * 2 * kv_heads * head_dim]
    norm_weights: Tensor  # [layers, head_dim], of the keys
    rotary: Any  # SGLang's rotary embedding, of all layers
    caches: LayerCaches
    shape: tuple[int, int, int, int]  # layers, 2, kv_heads, head_dim
    eps: float  # of the norm


def stack_problem(model: Any, pool: Any) -> str | None:
    """Why the layers cannot be written at once; None when they can.

    Args:
        model: SGLang's drafter.
        pool: the drafter's KV pool.
    """
    if type(model).prepare_context_hidden_for_kv is not (
        DFlashDraftModel.prepare_context_hidden_for_kv
    ):
        return "each layer has its own input"
    for index, layer in enumerate(model.layers):
        attention = layer.self_attn
        sliceable, reason = can_dflash_slice_qkv_weight(attention.qkv_proj)
        if not sliceable:
            return f"layer {index}: {reason}"
        if attention.v_scale is not None:
            return f"layer {index} scales its values"
        if _fingerprint(attention) != _fingerprint(model.layers[0].self_attn):
            return f"layer {index} differs from layer 0 in sizes, norm, bias or rotary embedding"
    rotary = model.layers[0].self_attn.rotary_emb
    if not (hasattr(rotary, "cos_sin_cache") and rotary.is_neox_style):
        return f"{type(rotary).__name__} does not rotate halves by a table"
    return _pool_problem(pool)


def _fingerprint(attention: Any) -> tuple[Any, ...]:
    """What must be the same in all layers."""
    return (
        attention.num_kv_heads,
        attention.head_dim,
        attention.q_size,
        attention.qkv_proj.bias is None,
        attention.k_norm.variance_epsilon,
        id(attention.rotary_emb),  # SGLang makes one for all equal configurations
    )


def _pool_problem(pool: Any) -> str | None:
    """Why the op cannot write this pool's buffers as `set_kv_buffer` would."""
    if type(pool).set_kv_buffer is not MHATokenToKVPool.set_kv_buffer:
        return f"{type(pool).__name__} stores in its own way"
    if pool.is_quantized_kv_cache or pool.kv_cache_layout != "nhd":
        return f"the pool is quantized or of layout {pool.kv_cache_layout}"
    if pool.dtype not in CACHE_DTYPES:
        return f"the pool holds {pool.dtype}"
    if pool.head_dim != pool.v_head_dim:
        return "keys and values have different sizes"
    return None


@torch.no_grad()
def stack_layers(model: Any, pool: Any) -> LayerStack:
    """Copy the layers' projections side by side, as the weights are now.

    Args:
        model: SGLang's drafter.
        pool: its KV pool; `stack_problem` finds nothing.
    """
    layers = [layer.self_attn for layer in model.layers]
    first = layers[0]
    kv_rows = slice(first.q_size, first.q_size + 2 * first.kv_size)
    norms = [one.k_norm.weight for one in layers]
    bias = None
    if first.qkv_proj.bias is not None:
        bias = torch.cat([one.qkv_proj.bias[kv_rows] for one in layers])
    return LayerStack(
        method=first.qkv_proj.quant_method,
        weight=torch.cat([one.qkv_proj.weight[kv_rows] for one in layers]),
        bias=bias,
        norm_weights=torch.stack([1 + norm if first.use_gemma_norm else norm for norm in norms]),
        rotary=first.rotary_emb,
        caches=_caches(layers, pool),
        shape=(len(layers), 2, first.num_kv_heads, first.head_dim),
        eps=first.k_norm.variance_epsilon,
    )


def _caches(layers: list[Any], pool: Any) -> LayerCaches:
    # FP8 pools store bytes.
    at = [one.attn.layer_id - pool.start_layer for one in layers]
    keys = [pool.k_buffer[index].view(pool.dtype) for index in at]
    values = [pool.v_buffer[index].view(pool.dtype) for index in at]
    scales = [[_scale(one.attn.k_scale), _scale(one.attn.v_scale)] for one in layers]
    if pool.dtype != FP8 or all(scale == 1.0 for pair in scales for scale in pair):
        return LayerCaches.of(keys, values)
    return LayerCaches.of(
        keys, values, torch.tensor(scales, dtype=torch.float32, device=keys[0].device)
    )


def _scale(value: Any) -> float:
    return 1.0 if value is None else float(value)
