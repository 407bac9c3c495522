"""Gated MoE experts in torch, in three variants: equal up to rounding, different in cost.

For a token x with chosen experts e and router weights r_e, every variant computes

    y = sum_e  r_e * ( silu(x G_e^T) * (x U_e^T) ) D_e^T

with G_e and U_e stacked in ``gate_up[e]`` and D_e^T = ``down[e]``.

| variant | matrix products                   | weights read       | fastest for               |
|---------|-----------------------------------|--------------------|---------------------------|
| looped  | two per (token, expert) pair      | the chosen experts | one or two tokens         |
| batched | two: every expert for every token | all experts        | a few tokens, few experts |
| grouped | two per chosen expert             | the chosen experts | many tokens               |

Shapes throughout: ``hidden`` [tokens, dim], ``ids`` [tokens, top_k] int, ``weights``
[tokens, top_k] float.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_sglang.cpu.matmul.gemm import linear, register_weight


class Experts(NamedTuple):
    """One layer's weights, and the views that the variants multiply by."""

    gate_up: Tensor  # [experts, 2 * intermediate, dim]
    down: Tensor  # [experts, intermediate, dim]
    all_gate_up: Tensor  # [experts * 2 * intermediate, dim]
    all_down: Tensor  # [dim, experts * intermediate]
    each_gate_up: tuple[Tensor, ...]  # per expert [2 * intermediate, dim]
    each_down: tuple[Tensor, ...]  # per expert [dim, intermediate]

    @classmethod
    def from_weights(cls, gate_up: Tensor, down: Tensor) -> Experts:
        """Register views of the weights; after a change in place call `gemm.repack_weights`.

        Args:
            gate_up: [experts, 2 * intermediate, dim], contiguous.
            down: [experts, intermediate, dim], contiguous.
        """
        all_gate_up, all_down = gate_up.view(-1, gate_up.shape[2]), down.view(-1, down.shape[2]).t()
        each_gate_up, each_down = gate_up.unbind(), down.transpose(1, 2).unbind()
        for weight in (all_gate_up, all_down, *each_gate_up, *each_down):
            register_weight(weight)
        return cls(gate_up, down, all_gate_up, all_down, each_gate_up, each_down)


Variant = Callable[[Tensor, Experts, Tensor, Tensor], Tensor]


def reference(hidden: Tensor, experts: Experts, ids: Tensor, weights: Tensor) -> Tensor:
    """The definition, one token and one expert at a time."""
    out = torch.zeros_like(hidden)
    for token, (chosen, shares) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
        for expert, share in zip(chosen, shares, strict=True):
            gate, up = (hidden[token] @ experts.gate_up[expert].T).chunk(2)
            out[token] += share * ((F.silu(gate) * up) @ experts.down[expert])
    return out


def looped(hidden: Tensor, experts: Experts, ids: Tensor, weights: Tensor) -> Tensor:
    """One (token, expert) pair at a time."""
    tokens, top_k = ids.shape
    chosen = ids.flatten().tolist()
    rows = hidden.unsqueeze(1).unbind()  # each [1, dim]
    each_gate_up, down = experts.each_gate_up, experts.down
    inner = torch.cat([F.linear(rows[i // top_k], each_gate_up[e]) for i, e in enumerate(chosen)])
    shares = weights.reshape(-1, 1).to(hidden.dtype)
    inner = _gated(inner).mul_(shares)  # [tokens * top_k, intermediate]
    pairs = inner.unsqueeze(1).unbind()
    out = torch.empty_like(hidden)
    for token in range(tokens):
        row, first = out[token : token + 1], token * top_k
        torch.mm(pairs[first], down[chosen[first]], out=row)
        for i in range(first + 1, first + top_k):
            row.addmm_(pairs[i], down[chosen[i]])
    return out


def batched(hidden: Tensor, experts: Experts, ids: Tensor, weights: Tensor) -> Tensor:
    """All experts for all tokens, as one wide gated layer; unchosen columns get weight 0."""
    tokens, (count, intermediate, _) = hidden.shape[0], experts.down.shape
    share = hidden.new_zeros(tokens, count).scatter_(1, ids.long(), weights.to(hidden.dtype))
    inner = linear(hidden, experts.all_gate_up)
    inner = _gated(inner.view(tokens, count, 2 * intermediate))  # [tokens, experts, intermediate]
    inner.mul_(share.unsqueeze(-1))
    return linear(inner.view(tokens, count * intermediate), experts.all_down)


def grouped(hidden: Tensor, experts: Experts, ids: Tensor, weights: Tensor) -> Tensor:
    """Tokens sorted by expert, one slice per expert."""
    top_k = ids.shape[1]
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=len(experts.each_gate_up)).tolist()
    token = order // top_k  # [tokens * top_k]: token of each sorted (token, expert) pair
    rows = hidden.index_select(0, token)
    used = [expert for expert, count in enumerate(counts) if count]
    sizes = [count for count in counts if count]
    slices = torch.split_with_sizes(rows, sizes)
    inner = [linear(part, experts.each_gate_up[e]) for part, e in zip(slices, used, strict=True)]
    shares = weights.flatten().index_select(0, order).to(hidden.dtype).unsqueeze(1)
    scaled = torch.split_with_sizes(_gated(torch.cat(inner)).mul_(shares), sizes)
    outer = [linear(part, experts.each_down[e]) for part, e in zip(scaled, used, strict=True)]
    return torch.zeros_like(hidden).index_add_(0, token, torch.cat(outer))


def _gated(inner: Tensor) -> Tensor:
    """silu(gate) * up: [..., 2 * intermediate] to a new tensor [..., intermediate]."""
    gate, up = inner.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


VARIANTS: dict[str, Variant] = {"looped": looped, "batched": batched, "grouped": grouped}


def padded(out: Tensor, tokens: int) -> Tensor:
    """Experts' output [routed, dim] with zeros for the tokens that were routed to none."""
    return out if len(out) == tokens else F.pad(out, (0, 0, 0, tokens - len(out)))


def route(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Choose experts by a softmax over all of them.

    Args:
        logits: [tokens, experts].
        top_k: experts per token.
        renormalize: whether the chosen experts' weights are scaled to sum to 1. They are then a
            softmax over the chosen logits alone, which is cheaper than one over all experts.

    Returns:
        ids [tokens, top_k] int64 and weights [tokens, top_k] float32, largest first.
    """
    logits = logits.float()
    if renormalize:
        chosen, ids = logits.topk(top_k, dim=-1)
        return ids, chosen.softmax(-1)
    weights, ids = logits.softmax(-1).topk(top_k, dim=-1)
    return ids, weights
