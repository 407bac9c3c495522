"""Replacements of SGLang's elementwise kernels in a Qwen3.5 layer."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from dflash_sglang.cpu.gated_delta.kernel_args import require
from dflash_sglang.cpu.models.layers import rms_norm


def fused_qkvzba_split_reshape_cat_contiguous(
    mixed_qkvz: Tensor,
    mixed_ba: Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split the two input projections.

    Args:
        mixed_qkvz: [tokens, 2 * num_heads_qk * head_qk + 2 * num_heads_v * head_v].
        mixed_ba: [tokens, 2 * num_heads_v], b before a.
        num_heads_qk: key heads.
        num_heads_v: value heads.
        head_qk: K.
        head_v: V.

    Returns:
        The convolution's input [tokens, channels], contiguous; z [tokens, num_heads_v, head_v]; b
        and a [tokens, num_heads_v].
    """
    channels = 2 * num_heads_qk * head_qk + num_heads_v * head_v
    mixed, z = mixed_qkvz[:, :channels], mixed_qkvz[:, channels:]
    b, a = mixed_ba[:, :num_heads_v], mixed_ba[:, num_heads_v:]
    return mixed.contiguous(), z.reshape(-1, num_heads_v, head_v), b.contiguous(), a.contiguous()


def gated_norm(norm: Any, x: Tensor, z: Tensor) -> Tensor:
    """``RMSNorm.forward`` of SGLang's gated norm: ``x / rms(x) * weight * silu(z)``.

    Args:
        norm: the module; it norms before the gate, over the whole last axis.
        x: [rows, dim].
        z: [rows, dim].

    Returns:
        [rows, dim] in x's dtype.

    Raises:
        PlatformError: a norm after the gate, over groups, or with another activation.
    """
    require(
        norm.norm_before_gate and norm.group_size is None and norm.activation == "swish",
        "layernorm_gated.RMSNorm",
        "norm_before_gate=True, group_size=None and activation='swish'",
    )
    normed = rms_norm(x.float(), norm.weight.float(), norm.eps)
    return normed.mul_(F.silu(z.float())).to(x.dtype)


def fused_sigmoid_mul(
    attn_output: Tensor, gate: Tensor, inplace: bool = False, quant: bool = False
) -> Tensor:
    """``attn_output * sigmoid(gate)``.

    Args:
        attn_output: [tokens, heads * dim].
        gate: [tokens, heads * dim] or [tokens, heads, dim].
        inplace: whether to write to ``attn_output``.
        quant: False.

    Returns:
        [tokens, heads * dim].

    Raises:
        PlatformError: a quantised output.
    """
    require(not quant, "fused_sigmoid_mul", "quant=False")
    share = gate.reshape(attn_output.shape).sigmoid()
    return attn_output.mul_(share) if inplace else attn_output * share


def fused_gate_sigmoid_mul(
    hidden_states: Tensor, gate_weight: Tensor, shared_output: Tensor
) -> Tensor:
    """``sigmoid(hidden_states w) * shared_output``.

    Args:
        hidden_states: [tokens, dim].
        gate_weight: [dim].
        shared_output: [tokens, dim].
    """
    return shared_output * (hidden_states @ gate_weight).sigmoid().unsqueeze(-1)


def fused_gate_sigmoid_mul_add(
    hidden_states: Tensor, gate_weight: Tensor, shared_output: Tensor, final_hidden_states: Tensor
) -> None:
    """Add ``fused_gate_sigmoid_mul`` to ``final_hidden_states`` [tokens, dim], in place."""
    share = (hidden_states @ gate_weight).sigmoid().unsqueeze(-1)
    final_hidden_states.addcmul_(shared_output, share)
