"""Sizes of the verifiers, and the weights they start from."""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class DeltaShape:
    """Sizes of a gated delta net."""

    num_key_heads: int = 4
    num_value_heads: int = 8  # equally many for each key head
    key_dim: int = 32
    value_dim: int = 32
    conv_kernel: int = 4

    @property
    def key_size(self) -> int:
        """Width of all keys of a token."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Width of all values of a token."""
        return self.num_value_heads * self.value_dim


@dataclass(frozen=True)
class VerifierShape:
    """Sizes and variant of a verifier; the defaults are those of the MoE pair."""

    vocab_size: int = 1024
    hidden_size: int = 256
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    rotary_dim: int = 64  # leading dimensions of a head that are rotated
    num_experts: int = 8
    top_k: int = 2
    expert_size: int = 64
    rope_theta: float = 10000.0
    max_positions: int = 2048
    rms_norm_eps: float = 1e-6
    delta: DeltaShape | None = None  # of the layers that are not attention
    full_attention_interval: int = 1  # every n-th layer is attention
    output_gate: bool = False  # whether attention outputs are gated
    shared_expert_size: int = 0  # width of the expert that every token takes; 0: none
    norm_offset: float = 0.0  # added to the stored weights of norms

    def is_attention(self, layer: int) -> bool:
        """Whether `layer` is attention, not a gated delta net."""
        return (layer + 1) % self.full_attention_interval == 0


MOE = VerifierShape()
HYBRID = VerifierShape(
    num_layers=4,
    rotary_dim=16,
    delta=DeltaShape(),
    full_attention_interval=4,
    output_gate=True,
    shared_expert_size=64,
    norm_offset=1.0,
)


def weight(*shape: int) -> nn.Parameter:
    """A matrix or a stack of matrices, normal with deviation 0.02."""
    return nn.Parameter(torch.randn(*shape) * 0.02)
