"""The verifier as it is trained: `Qwen3MoeForCausalLM` or `Qwen3_5MoeForCausalLM`, embedding tied.

It is written out because sorting tokens by expert, bf16 products, compiled mixers and delta rules
by chunk train several times as fast on a CPU as the general implementations. bench/train/export.py
writes the checkpoint that transformers and SGLang load; the evaluation runs on that checkpoint, not
on this module.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.train.verifier.experts import Experts, SharedExpert
from bench.train.verifier.mixers import Attention, DeltaNet, norm, rotary_tables
from bench.train.verifier.shape import VerifierShape, weight


class VerifierOutput(NamedTuple):
    """Results of a forward."""

    hidden: Tensor  # [rows, length, hidden] after the final norm
    layers: list[Tensor]  # output of every decoder layer, [rows, length, hidden]
    balance_loss: Tensor  # [] load balance of the experts, 1 when even


class VerifierLayer(nn.Module):
    """One decoder layer: a mixer of tokens and a mixture of experts."""

    def __init__(self, shape: VerifierShape, layer: int) -> None:
        super().__init__()
        self.shape = shape
        self.mixer = _mixer(shape, layer)
        self.experts = Experts(shape)
        self.shared = SharedExpert(shape) if shape.shared_expert_size else None
        self.input_norm = nn.Parameter(torch.ones(shape.hidden_size) - shape.norm_offset)
        self.post_norm = nn.Parameter(torch.ones(shape.hidden_size) - shape.norm_offset)
        self.mix: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] = self._mix

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, length, hidden] -> same, and the balance loss."""
        x, normed, probs = self.mix(x, cos, sin)
        mixed, balance = self.experts(normed, probs)
        return x + mixed.view_as(x), balance

    def _mix(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The mixer and everything that is token-wise before the routed experts.

        Returns the residual stream, the experts' input [tokens, hidden] bf16 and the router's
        probabilities [tokens, experts].
        """
        x = x + self.mixer(norm(x, self.input_norm, self.shape), cos, sin)
        normed = norm(x, self.post_norm, self.shape).flatten(0, 1)
        narrow = normed.bfloat16()
        if self.shared is not None:
            x = x + self.shared(narrow).view_as(x)
        return x, narrow, self.experts.router(normed)


class Verifier(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self, shape: VerifierShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = weight(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(VerifierLayer(shape, i) for i in range(shape.num_layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden_size) - shape.norm_offset)
        cos, sin = rotary_tables(shape.max_positions, shape.rotary_dim, shape.rope_theta)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def compile_layers(self) -> None:
        """Compile the mixers (needs a C++ compiler); lengths stay dynamic."""
        # Variants of one function are limited, and those of a model trained before would count.
        torch.compiler.reset()
        compiled = torch.compile(VerifierLayer._mix, dynamic=True)
        for layer in self.decoder_layers():
            layer.mix = partial(compiled, layer)

    def decoder_layers(self) -> Iterator[VerifierLayer]:
        """The layers, typed: `nn.ModuleList` knows its elements as modules only."""
        for layer in self.layers:
            assert isinstance(layer, VerifierLayer)
            yield layer

    def forward(self, ids: Tensor) -> VerifierOutput:
        """ids: [rows, length] int64, every row starting at position 0."""
        cos, sin = self.cos[: ids.shape[1], None], self.sin[: ids.shape[1], None]
        x = F.embedding(ids, self.embed)
        balance, outputs = x.new_zeros(()), []
        for layer in self.decoder_layers():
            x, layer_balance = layer(x, cos, sin)
            balance = balance + layer_balance / len(self.layers)
            outputs.append(x)
        return VerifierOutput(norm(x, self.norm, self.shape), outputs, balance)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., vocab] float32, with a bf16 product."""
        return F.linear(hidden.bfloat16(), self.embed.bfloat16()).float()


def _mixer(shape: VerifierShape, layer: int) -> nn.Module:
    if shape.is_attention(layer):
        return Attention(shape)
    if shape.delta is None:
        raise ValueError(f"layer {layer} is a gated delta net, and its sizes are not given")
    return DeltaNet(shape, shape.delta)
