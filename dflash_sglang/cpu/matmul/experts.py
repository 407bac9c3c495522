"""Gated experts in torch, in three forms: one result up to rounding, three costs.

For a token x with chosen experts e and router weights r_e, every form computes

    y = sum_e  r_e * ( silu(x G_e^T) * (x U_e^T) ) D_e^T

with G_e and U_e stacked in ``gate_up[e]`` and D_e^T = ``down[e]``.

| form    | products                          | reads              | cheapest for              |
|---------|-----------------------------------|--------------------|---------------------------|
| looped  | two per (token, expert) pair      | the chosen experts | one or two tokens         |
| batched | two: every expert for every token | all experts        | a few tokens, few experts |
| grouped | two per expert that was chosen    | the chosen experts | many tokens               |

Shapes throughout: ``hidden`` [tokens, dim], ``ids`` [tokens, top_k] int, ``weights``
[tokens, top_k] float.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_sglang.cpu.matmul.gemm import linear, remember


class Experts(NamedTuple):
    """One layer's weights, and the views that the forms multiply by."""

    gate_up: Tensor  # [experts, 2 * width, dim]
    down: Tensor  # [experts, width, dim]
    all_in: Tensor  # [experts * 2 * width, dim]
    all_out: Tensor  # [dim, experts * width]
    each_in: tuple[Tensor, ...]  # [2 * width, dim] each
    each_out: tuple[Tensor, ...]  # [dim, width] each

    @classmethod
    def of(cls, gate_up: Tensor, down: Tensor) -> Experts:
        """Views of weights; values that change in place are seen, but for `products.refresh`.

        Args:
            gate_up: [experts, 2 * width, dim], contiguous.
            down: [experts, width, dim], contiguous.
        """
        all_in, all_out = gate_up.view(-1, gate_up.shape[2]), down.view(-1, down.shape[2]).t()
        each_in, each_out = gate_up.unbind(), down.transpose(1, 2).unbind()
        for one in (all_in, all_out, *each_in, *each_out):
            remember(one)
        return cls(gate_up, down, all_in, all_out, each_in, each_out)


Form = Callable[[Tensor, Experts, Tensor, Tensor], Tensor]


def reference(hidden: Tensor, experts: Experts, ids: Tensor, weights: Tensor) -> Tensor:
    """The definition, one token and one expert at a time."""
    out = torch.zeros_like(hidden)
    for token, (chosen, shares) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
        for expert, share in zip(chosen, shares, strict=True):
            gate, up = (hidden[token] @ experts.gate_up[expert].T).chunk(2)
            out[token] += share * ((F.silu(gate) * up) @ experts.down[expert])
    return out


def looped(hidden: Tensor, experts: Experts, ids: Tensor, weights: Tensor) -> Tensor:
    """Every pair of a token and an expert by itself."""
    tokens, top_k = ids.shape
    chosen = ids.flatten().tolist()
    rows = hidden.unsqueeze(1).unbind()  # each [1, dim]
    each_in, down = experts.each_in, experts.down
    inner = torch.cat([F.linear(rows[i // top_k], each_in[e]) for i, e in enumerate(chosen)])
    inner = _gated(inner).mul_(weights.reshape(-1, 1).to(hidden.dtype))  # [tokens * top_k, width]
    pairs = inner.unsqueeze(1).unbind()
    out = torch.empty_like(hidden)
    for token in range(tokens):
        row, first = out[token : token + 1], token * top_k
        torch.mm(pairs[first], down[chosen[first]], out=row)
        for i in range(first + 1, first + top_k):
            row.addmm_(pairs[i], down[chosen[i]])
    return out


def batched(hidden: Tensor, experts: Experts, ids: Tensor, weights: Tensor) -> Tensor:
    """All experts for all tokens, as one wide gated layer whose unchosen columns have weight 0."""
    tokens, (count, width, _) = hidden.shape[0], experts.down.shape
    share = hidden.new_zeros(tokens, count).scatter_(1, ids.long(), weights.to(hidden.dtype))
    inner = linear(hidden, experts.all_in)
    inner = _gated(inner.view(tokens, count, 2 * width))  # [tokens, experts, width]
    inner.mul_(share.unsqueeze(-1))
    return linear(inner.view(tokens, count * width), experts.all_out)


def grouped(hidden: Tensor, experts: Experts, ids: Tensor, weights: Tensor) -> Tensor:
    """Tokens sorted by expert, one slice per expert."""
    top_k = ids.shape[1]
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=len(experts.each_in)).tolist()
    token = order // top_k  # [tokens * top_k]: whose row each sorted slot is
    rows = hidden.index_select(0, token)
    occurring = [expert for expert, count in enumerate(counts) if count]
    sizes = [count for count in counts if count]
    slices = torch.split_with_sizes(rows, sizes)
    inner = [linear(part, experts.each_in[e]) for part, e in zip(slices, occurring, strict=True)]
    shares = weights.flatten().index_select(0, order).to(hidden.dtype).unsqueeze(1)
    scaled = torch.split_with_sizes(_gated(torch.cat(inner)).mul_(shares), sizes)
    outer = [linear(part, experts.each_out[e]) for part, e in zip(scaled, occurring, strict=True)]
    return torch.zeros_like(hidden).index_add_(0, token, torch.cat(outer))


def _gated(inner: Tensor) -> Tensor:
    """silu(gate) * up, [..., 2 * width] to [..., width]; a new tensor, to be scaled in place."""
    gate, up = inner.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


FORMS: dict[str, Form] = {"looped": looped, "batched": batched, "grouped": grouped}


def route(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Choose experts by a softmax over all of them.

    Args:
        logits: [tokens, experts].
        top_k: experts per token.
        renormalize: whether the chosen experts' weights are scaled to sum to 1. They are then a
            softmax over the chosen logits alone, which spares the one over all experts.

    Returns:
        ids [tokens, top_k] int64 and weights [tokens, top_k] float32, largest first.
    """
    logits = logits.float()
    if renormalize:
        chosen, ids = logits.topk(top_k, dim=-1)
        return ids, chosen.softmax(-1)
    weights, ids = logits.softmax(-1).topk(top_k, dim=-1)
    return ids, weights
