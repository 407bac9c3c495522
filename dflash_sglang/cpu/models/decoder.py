"""A fused decoder stack, for Qwen3-MoE verifiers and DFlash drafters.

SGLang's forward of these models is written for devices on which call overhead is hidden. On a CPU,
nine tenths of a small model's step through it is Python. This forward computes the same for one
rank without expert placement. It reads the modules that SGLang built and loaded, so weight updates
work as before.

    x = embedding
    for each layer:   x += attention(norm(x));   x += mlp(norm(x))
    norm(x)
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.aux_hidden_states import AuxHiddenStateList
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_context import get_attn_backend
from torch import Tensor, nn

from dflash_sglang.cpu.matmul.expert_autotune import VariantTable, expert_weights
from dflash_sglang.cpu.matmul.experts import padded, route
from dflash_sglang.cpu.matmul.gemm import linear
from dflash_sglang.cpu.matmul.routed import routed_tokens
from dflash_sglang.cpu.models.layers import (
    RotaryTables,
    gated_mlp,
    rms_norm,
    rotary_tables,
    rotate,
    unit_norm,
)

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

Mlp = Callable[[nn.Module, Tensor], Tensor]
ExpertMlp = Callable[[nn.Module, Tensor, int], Tensor]


def run_layers(
    model: Any,
    hidden: Tensor,
    positions: Tensor,
    batch: ForwardBatch,
    mlp: Mlp,
    taps: Collection[int] = (),
) -> tuple[Tensor, AuxHiddenStateList]:
    """The stack, final norm included.

    Args:
        model: has ``layers`` and ``norm``.
        hidden: [tokens, dim], the embeddings; not modified.
        positions: [tokens] int64.
        batch: its KV slots to write are read by the attention backend, which has planned the
            batch.
        mlp: second half of a layer; takes its module and the normed input.
        taps: layers whose input is returned, SGLang's ``layers_to_capture``.

    Returns:
        The normed output [tokens, dim] and the tapped inputs, each [tokens, dim].
    """
    backend = get_attn_backend()
    rotary = rotary_tables(model.layers[0].self_attn.rotary_emb.cos_sin_cache, positions)
    tapped = AuxHiddenStateList()
    for index, layer in enumerate(model.layers):
        if index in taps:
            tapped.append(hidden)  # not modified later: every addition below makes a new tensor
        normed = _norm(layer.input_layernorm, hidden)
        hidden = hidden + _attention(layer.self_attn, normed, rotary, backend, batch)
        hidden = hidden + mlp(layer.mlp, _norm(layer.post_attention_layernorm, hidden))
    return _norm(model.norm, hidden), tapped


def _norm(norm: Any, x: Tensor) -> Tensor:
    return rms_norm(x, norm.weight, norm.variance_epsilon)


def _attention(
    block: Any, hidden: Tensor, rotary: RotaryTables, backend: Any, batch: ForwardBatch
) -> Tensor:
    """Norm and rotate queries and keys together, which are adjacent in the projection."""
    qkv = linear(hidden, block.qkv_proj.weight, block.qkv_proj.bias)
    qkv = qkv.view(hidden.shape[0], -1, block.head_dim)  # [tokens, heads + 2 * kv_heads, dim]
    heads = (block.num_heads, block.num_kv_heads)
    normed = unit_norm(qkv[:, : sum(heads)], block.q_norm.variance_epsilon)
    query, key = torch.split_with_sizes(normed, heads, dim=1)
    query.mul_(block.q_norm.weight)
    key.mul_(block.k_norm.weight)
    query, key = torch.split_with_sizes(rotate(normed, rotary), heads, dim=1)
    value = qkv[:, sum(heads) :]
    out = backend.forward_extend(query, key, value, block.attn, batch)
    return linear(out, block.o_proj.weight, block.o_proj.bias)


def dense_mlp(mlp: Any, hidden: Tensor) -> Tensor:
    """The drafter's MLP.

    Args:
        mlp: has ``gate_up_proj`` and ``down_proj``.
        hidden: [tokens, dim].

    Returns:
        [tokens, dim].
    """
    return gated_mlp(hidden, mlp.gate_up_proj.weight, mlp.down_proj.weight)


def expert_mlp(variants: VariantTable) -> ExpertMlp:
    """The verifier's MLP: router and experts.

    Args:
        variants: the variant of the experts to run by token count.

    Returns:
        A function of the sparse block, its normed input [tokens, dim] and how many of its tokens
        are routed to experts.
    """

    def run(mlp: Any, hidden: Tensor, routed: int) -> Tensor:
        config = mlp.topk.topk_config
        chosen = hidden[:routed]
        ids, weights = route(linear(chosen, mlp.gate.weight), config.top_k, config.renormalize)
        out = variants.select(routed)(chosen, expert_weights(mlp.experts), ids, weights)
        return padded(out, len(hidden))

    return run


def qwen3_moe_forward(mlp: ExpertMlp) -> Callable[..., Any]:
    """Replacement for ``Qwen3MoeModel.forward``.

    Args:
        mlp: from ``expert_mlp``.

    Returns:
        A method of the model.
    """

    def forward(
        model: Any,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: ForwardBatch,
        input_embeds: Tensor | None = None,
        pp_proxy_tensors: None = None,
    ) -> Tensor | tuple[Tensor, AuxHiddenStateList]:
        hidden = model.embed_tokens(input_ids) if input_embeds is None else input_embeds
        routed = routed_tokens(len(hidden))

        def experts(block: nn.Module, normed: Tensor) -> Tensor:
            return mlp(block, normed, routed)

        hidden, tapped = run_layers(
            model, hidden, positions, forward_batch, experts, model.layers_to_capture
        )
        return (hidden, tapped) if tapped else hidden

    return forward


def drafter_forward(
    model: Any,
    input_ids: Tensor,
    positions: Tensor,
    forward_batch: ForwardBatch,
    input_embeds: Tensor | None = None,
    get_embedding: bool = False,
    pp_proxy_tensors: None = None,
) -> LogitsProcessorOutput:
    """Replacement for ``DFlashDraftModel.forward``."""
    hidden = model.embed_tokens(input_ids) if input_embeds is None else input_embeds
    hidden, _ = run_layers(model, hidden, positions, forward_batch, dense_mlp)
    return LogitsProcessorOutput(next_token_logits=None, hidden_states=hidden)
