"""A plain DFlash draft head, written to be read.

The method is that of Chen et al., *DFlash: Block Diffusion for Flash Speculative Decoding*. One
forward drafts a whole block. Block position 0 holds the anchor, the last committed token, at
position p; block positions 1 .. block_size - 1 hold the mask token at p + 1 ...; block position i
predicts the token at p + i. The verifier's hidden states of positions < p, tapped after some of its
layers, are projected once and injected as additional keys and values into the attention of every
draft layer (*context KV*). Within the block attention is not causal in full layers: the positions
attend to each other. Embedding and LM head are the verifier's.

            keys/values:   context 0 .. p-1      block p .. p+block_size-1
                           (from the taps)       (from the layer's own input)
            queries:                             block p .. p+block_size-1
"""

from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from dflash_sglang.drafter.checkpoint import (
    CheckpointError,
    DraftConfig,
    load_config,
    read_headers,
    tensor_problems,
)


class LayerKV(NamedTuple):
    """Keys and values of one draft layer, keys already rotated."""

    key: Tensor  # [bs, length, kv_heads, head_dim]
    value: Tensor  # [bs, length, kv_heads, head_dim]


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension, in float32 or better."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> same."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.rms_norm(wide, self.weight.shape, self.weight.to(wide.dtype), self.eps).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention of a block over its context and itself."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.attention_bias
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.config = config
        self.q_proj = nn.Linear(hidden, q_size, bias=bias)
        self.k_proj = nn.Linear(hidden, kv_size, bias=bias)
        self.v_proj = nn.Linear(hidden, kv_size, bias=bias)
        self.o_proj = nn.Linear(q_size, hidden, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def keys_values(self, x: Tensor, positions: Tensor) -> LayerKV:
        """Keys and values of x [bs, length, hidden] at positions [bs, length]."""
        c = self.config
        split = (*x.shape[:2], c.num_kv_heads, c.head_dim)
        key = self.k_norm(self.k_proj(x).view(split))
        return LayerKV(rotate(key, positions, c), self.v_proj(x).view(split))

    def forward(self, x: Tensor, positions: Tensor, context: LayerKV, visible: Tensor) -> Tensor:
        """Attend from every position of a block.

        Args:
            x: [bs, block, hidden].
            positions: [bs, block] int64.
            context: keys and values of the context, length `ctx`.
            visible: [bs, block, ctx + block] bool, which keys a block position attends to.
        """
        c = self.config
        query = self.q_norm(self.q_proj(x).view(*x.shape[:2], c.num_heads, c.head_dim))
        query = rotate(query, positions, c)
        own = self.keys_values(x, positions)
        key = torch.cat([context.key, own.key], dim=1)
        value = torch.cat([context.value, own.value], dim=1)
        out = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=visible[:, None],
            enable_gqa=True,
        )
        mixed: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return mixed


class MLP(nn.Module):
    """The gated feed-forward block of Qwen3."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> same."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DraftLayer(nn.Module):
    """One pre-norm layer."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, positions: Tensor, context: LayerKV, visible: Tensor) -> Tensor:
        """Arguments as `Attention.forward`."""
        x = x + self.self_attn(self.input_layernorm(x), positions, context, visible)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DraftModel(nn.Module):
    """A plain DFlash head; parameter names are those of the checkpoint."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        if config.rope_type != "default":
            raise CheckpointError(
                f"the reference drafter knows rope_type 'default' only, got {config.rope_type!r}"
            )
        self.config = config
        self.fc = nn.Linear(config.context_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def context_kv(self, taps: Tensor, positions: Tensor) -> list[LayerKV]:
        """Project tapped hidden states into the keys and values of every layer.

        Args:
            taps: [bs, length, context_size], the tapped layers side by side in the order of
                `target_layer_ids`.
            positions: [bs, length] int64, positions of the tokens the states belong to.
        """
        states = self.hidden_norm(self.fc(taps))
        attentions = [layer.self_attn for layer in self.layers if isinstance(layer, DraftLayer)]
        return [attention.keys_values(states, positions) for attention in attentions]

    def forward(
        self,
        block: Tensor,
        positions: Tensor,
        context: list[LayerKV],
        context_positions: Tensor,
        context_valid: Tensor | None = None,
    ) -> Tensor:
        """Hidden states of a block; the verifier's LM head on positions from 1 on gives the drafts.

        Args:
            block: [bs, block, hidden], the verifier's embeddings of the anchor and the masks.
            positions: [bs, block] int64.
            context: what `context_kv` gave, one entry a layer, length `ctx`.
            context_positions: [bs, ctx] int64.
            context_valid: [bs, ctx] bool; False masks an entry (padding); None: all valid.

        Returns:
            [bs, block, hidden], after the final norm.
        """
        x = block
        for index, (layer, kv) in enumerate(zip(self.layers, context, strict=True)):
            visible = visibility(
                positions,
                context_positions,
                context_valid,
                window=self.config.window_of(index),
                causal=self.config.layer_causal[index],
            )
            x = layer(x, positions, kv, visible)
        out: Tensor = self.norm(x)
        return out

    def block_ids(self, anchor: Tensor, block_size: int) -> Tensor:
        """Token ids [bs, block_size] of blocks that start from anchor [bs]: then masks."""
        ids = anchor.new_full((len(anchor), block_size), self.config.mask_token_id)
        ids[:, 0] = anchor
        return ids


def visibility(
    positions: Tensor,
    context_positions: Tensor,
    context_valid: Tensor | None,
    *,
    window: int | None,
    causal: bool,
) -> Tensor:
    """Which keys every block position attends to: [bs, block, ctx + block] bool, context first.

    With a window, a block position attends to the keys less than `window` positions behind it,
    itself counted. Unless `causal`, it attends to all later positions of its block.
    """
    keys = torch.cat([context_positions, positions], dim=1)
    behind = positions[:, :, None] - keys[:, None]  # [bs, block, ctx + block]
    seen = torch.ones_like(behind, dtype=torch.bool)
    if window is not None:
        seen &= behind < window
    if causal:
        seen &= behind >= 0
    if context_valid is not None:
        seen[:, :, : context_valid.shape[1]] &= context_valid[:, None]
    return seen


def rotate(x: Tensor, positions: Tensor, config: DraftConfig) -> Tensor:
    """Rotary embedding of the first `rotary_dim` dimensions, halves paired.

    Args:
        x: [bs, length, heads, head_dim].
        positions: [bs, length] int64.
        config: supplies `rotary_dim` and `rope_theta`.
    """
    dim = config.rotary_dim
    wide = torch.promote_types(x.dtype, torch.float32)
    steps = torch.arange(0, dim, 2, device=x.device, dtype=wide)
    angle = positions[..., None].to(wide) * config.rope_theta ** (-steps / dim)
    cos, sin = angle.cos()[:, :, None], angle.sin()[:, :, None]  # [bs, length, 1, dim / 2]
    first, second = x[..., : dim // 2].to(wide), x[..., dim // 2 : dim].to(wide)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([turned.to(x.dtype), x[..., dim:]], dim=-1)


def load_draft(directory: Path, dtype: torch.dtype = torch.float32) -> DraftModel:
    """Load a plain head, strictly.

    Raises:
        CheckpointError: the configuration or a tensor is missing, unknown or misshapen.
    """
    config = load_config(directory)
    problems = tensor_problems(config, read_headers(directory))
    if problems:
        raise CheckpointError(f"{directory}: {'; '.join(problems)}")
    model = DraftModel(config)
    state: dict[str, Tensor] = {}
    for file in sorted(Path(directory).glob("*.safetensors")):
        state |= load_file(file)
    model.load_state_dict(state)
    return model.to(dtype).eval()
