"""The verifier as it is trained: the forward pass of `Qwen3MoeForCausalLM` with tied embeddings.

It is written out because sorting tokens by expert, bf16 products and a compiled attention block
train several times as fast on a CPU as the general implementation. `pair_export` turns the result
into a checkpoint that transformers and SGLang load; the evaluation runs on that checkpoint, not
on this module.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Expert groups are padded to this multiple: the CPU's matrix library prepares a product for every
# new shape, which costs more than the product itself.
SLOT_MULTIPLE = 64


@dataclass(frozen=True)
class VerifierShape:
    """Sizes of the verifier."""

    vocab_size: int = 1024
    hidden_size: int = 256
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    num_experts: int = 8
    top_k: int = 2
    expert_size: int = 64
    rope_theta: float = 10000.0
    max_positions: int = 2048
    rms_norm_eps: float = 1e-6


class VerifierOutput(NamedTuple):
    """What a forward pass gives."""

    hidden: Tensor  # [rows, length, hidden] after the final norm
    layers: list[Tensor]  # output of every decoder layer, [rows, length, hidden]
    balance_loss: Tensor  # [] load balance of the experts, 1 when even


class Slots(NamedTuple):
    """Where the experts' inputs lie: one group of slots an expert."""

    token_of_slot: Tensor  # [slots] int64; spare slots hold token 0
    slot_of_choice: Tensor  # [tokens * top_k] int64
    sizes: list[int]  # slots of each expert
    load: Tensor  # [experts] int64, choices of each expert


class Dispatch(torch.autograd.Function):
    """Copy tokens into the slots of their experts; the gradient is a gather, not a scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token_of_slot: Tensor, slot_of_choice: Tensor) -> Tensor:
        """Gather x [tokens, width] to [slots, width]; slot_of_choice [tokens * top_k]."""
        ctx.save_for_backward(slot_of_choice)
        ctx.tokens = len(x)
        return x[token_of_slot]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        """Sum the gradients of a token's slots; spare slots have none."""
        (slot_of_choice,) = ctx.saved_tensors
        choices = grad[slot_of_choice].view(ctx.tokens, -1, grad.shape[-1]).unbind(1)
        return sum(choices[1:], start=choices[0]), None, None


class Combine(torch.autograd.Function):
    """Take every choice's output from its slot; slots are taken once, so the gradient is a copy."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, slot_of_choice: Tensor) -> Tensor:
        """Gather outputs [slots, width] to [tokens * top_k, width]."""
        ctx.save_for_backward(slot_of_choice)
        ctx.slots = len(outputs)
        return outputs[slot_of_choice]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Gradients of the slots; zero for spare ones."""
        (slot_of_choice,) = ctx.saved_tensors
        return grad.new_zeros(ctx.slots, grad.shape[-1]).index_copy_(0, slot_of_choice, grad), None


class VerifierLayer(nn.Module):
    """One decoder layer: grouped-query attention and a mixture of experts."""

    def __init__(self, shape: VerifierShape) -> None:
        super().__init__()
        self.shape = shape
        hidden, kv = shape.hidden_size, shape.num_kv_heads * shape.head_dim
        self.q_proj = weight(shape.num_heads * shape.head_dim, hidden)
        self.k_proj = weight(kv, hidden)
        self.v_proj = weight(kv, hidden)
        self.o_proj = weight(hidden, shape.num_heads * shape.head_dim)
        self.gate = weight(shape.num_experts, hidden)
        self.gate_up = weight(shape.num_experts, 2 * shape.expert_size, hidden)
        self.down = weight(shape.num_experts, hidden, shape.expert_size)
        self.q_norm = nn.Parameter(torch.ones(shape.head_dim))
        self.k_norm = nn.Parameter(torch.ones(shape.head_dim))
        self.input_norm = nn.Parameter(torch.ones(hidden))
        self.post_norm = nn.Parameter(torch.ones(hidden))
        self.attend: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] = (
            self._attend
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, length, hidden] -> same, and the balance loss."""
        x, normed, probs = self.attend(x, cos, sin)
        mixed, balance = self._experts(normed, probs)
        return x + mixed.view_as(x), balance

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Attention and everything that is token-wise before the experts.

        Returns the residual stream, the experts' input [tokens, hidden] bf16 and the router's
        probabilities [tokens, experts].
        """
        s = self.shape
        rows, length, _ = x.shape
        heads, groups = s.num_kv_heads, s.num_heads // s.num_kv_heads
        qkv_weight = torch.cat([self.q_proj, self.k_proj, self.v_proj]).bfloat16()
        qkv = F.linear(self._norm(x, self.input_norm).bfloat16(), qkv_weight).view(
            rows, length, -1, s.head_dim
        )
        q, k, v = qkv.split((s.num_heads, heads, heads), dim=2)
        q = rotate(self._norm(q.float(), self.q_norm), cos, sin) * s.head_dim**-0.5
        k = rotate(self._norm(k.float(), self.k_norm), cos, sin)
        # One product per key head: its query heads lie one after another.
        q = q.bfloat16().view(rows, length, heads, groups, s.head_dim).permute(0, 2, 3, 1, 4)
        q = q.reshape(rows * heads, groups * length, s.head_dim)
        k = k.bfloat16().transpose(1, 2).reshape(rows * heads, length, s.head_dim)
        v = v.transpose(1, 2).reshape(rows * heads, length, s.head_dim)
        scores = torch.bmm(q, k.mT).view(-1, groups, length, length).float()
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        probs = scores.masked_fill(future, float("-inf")).softmax(-1).bfloat16()
        out = torch.bmm(probs.view(rows * heads, -1, length), v).view(
            rows, heads, groups, length, s.head_dim
        )
        out = out.permute(0, 3, 1, 2, 4).reshape(rows, length, -1)
        x = x + F.linear(out, self.o_proj.bfloat16())
        normed = self._norm(x, self.post_norm).flatten(0, 1)
        return x, normed.bfloat16(), F.linear(normed, self.gate).softmax(-1)

    def _experts(self, x: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Top-k experts of every token, [tokens, hidden] bf16 -> same, and the balance loss."""
        s = self.shape
        weights, chosen = probs.topk(s.top_k, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).bfloat16()
        slots = _assign_slots(chosen, s.num_experts)
        parts = Dispatch.apply(x, slots.token_of_slot, slots.slot_of_choice).split(slots.sizes)
        gate_up, down = self.gate_up.bfloat16().unbind(), self.down.bfloat16().unbind()
        gate, up = torch.cat(
            [F.linear(part, w) for part, w in zip(parts, gate_up, strict=True)]
        ).chunk(2, dim=-1)
        inner = (F.silu(gate) * up).split(slots.sizes)
        outputs = torch.cat([F.linear(part, w) for part, w in zip(inner, down, strict=True)])
        choices = Combine.apply(outputs, slots.slot_of_choice).view(-1, s.top_k, s.hidden_size)
        first, *others = (choices * weights[..., None]).unbind(1)
        share = slots.load / slots.load.sum()
        return sum(others, start=first), s.num_experts * (share * probs.mean(0)).sum()

    def _norm(self, x: Tensor, scale: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], scale, self.shape.rms_norm_eps)


class Verifier(nn.Module):
    """A Qwen3-MoE language model whose head is its embedding."""

    def __init__(self, shape: VerifierShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = weight(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(VerifierLayer(shape) for _ in range(shape.num_layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden_size))
        cos, sin = rotary_tables(shape.max_positions, shape.head_dim, shape.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def compile_layers(self) -> None:
        """Compile the attention blocks (needs a C++ compiler); lengths stay dynamic."""
        compiled = torch.compile(VerifierLayer._attend, dynamic=True)
        for layer in self.layers:
            layer.attend = lambda x, cos, sin, layer=layer: compiled(layer, x, cos, sin)

    def forward(self, ids: Tensor) -> VerifierOutput:
        """ids: [rows, length] int64, every row starting at position 0."""
        cos, sin = self.cos[: ids.shape[1], None], self.sin[: ids.shape[1], None]
        x = F.embedding(ids, self.embed)
        balance, outputs = x.new_zeros(()), []
        for layer in self.layers:
            x, layer_balance = layer(x, cos, sin)
            balance = balance + layer_balance / len(self.layers)
            outputs.append(x)
        return VerifierOutput(
            F.rms_norm(x, x.shape[-1:], self.norm, self.shape.rms_norm_eps), outputs, balance
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., vocab] float32, with a bf16 product."""
        return F.linear(hidden.bfloat16(), self.embed.bfloat16()).float()


def _assign_slots(chosen: Tensor, experts: int) -> "Slots":
    """Group the choices [tokens, top_k] by expert, groups padded to `SLOT_MULTIPLE`."""
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    load = torch.bincount(flat, minlength=experts)
    padded = (load + SLOT_MULTIPLE - 1) // SLOT_MULTIPLE * SLOT_MULTIPLE
    shift = (padded.cumsum(0) - padded) - (
        load.cumsum(0) - load
    )  # slots before an expert less choices before it
    slot_of_choice = torch.empty_like(order)
    slot_of_choice[order] = torch.arange(len(order)) + shift[flat[order]]
    token_of_slot = torch.zeros(int(padded.sum()), dtype=torch.int64)
    token_of_slot[slot_of_choice] = torch.arange(len(order)) // chosen.shape[1]
    return Slots(token_of_slot, slot_of_choice, padded.tolist(), load)


def rotary_tables(positions: int, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, each [positions, dim] float32."""
    frequency = theta ** (-torch.arange(0, dim, 2).float() / dim)
    angle = torch.outer(torch.arange(positions).float(), frequency).repeat(1, 2)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [rows, length, heads, dim] by tables [length, 1, dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def weight(*shape: int) -> nn.Parameter:
    """A matrix or a stack of matrices, normal with deviation 0.02."""
    return nn.Parameter(torch.randn(*shape) * 0.02)
