"""Attention over a paged KV pool, in torch: plan a batch once, attend in every layer.

One plan serves all layers of a forward. It splits the requests into groups of one query length,
pads each group to its longest context and keeps the KV slots of the whole group in one index, so
that a layer costs one gather and one scaled-dot-product call per group:

```
            context positions 0 .. kv_len-1           q_len = 3, kv_len = 6, causal, window_left = 2
          .-----------------------------------.            0 1 2 3 4 5
 request  |  prefix (already in the pool)     | queries    . x x x          query at position 3
          '-----------------------------------'            . . x x x        query at position 4
           slots[request, position]                        . . . x x x      query at position 5
```

Queries are always the last ``q_len`` positions of their context. A decode batch and a verify or
draft block have one query length, hence usually one group. Prefill has as many groups as lengths. A
group is split where context lengths differ so much that padding would cost more than a second call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

FULL_CONTEXT = -1  # window_left without a sliding window, SGLang's convention

# A group is split where that avoids more padding than this, in elements of K. Measured on two x86
# cores: a call costs as much as gathering 300 rows of 128 elements, and each query reads a row
# again at about an eighth of the cost of gathering it.
SPLIT_ELEMENTS = 300 * 128
QUERIES_PER_GATHER = 8


class AttentionGroup(NamedTuple):
    """Requests of one query length, padded to one context length."""

    q_len: int
    kv_len: Tensor  # [requests] int64: context length, the queries included
    slots: Tensor  # [requests * max_kv_len] int64: KV slot of every context position
    max_kv_len: int
    padded: bool  # whether some kv_len is below max_kv_len
    # [requests * q_len] int64: rows of the flat query batch; None: all of them, in order
    tokens: Tensor | None
    # by (causal, window_left); built on first use, shared by the layers of one kind
    masks: dict[tuple[bool, int], Tensor | None]


def plan_attention(
    req_to_token: Tensor,
    rows: Tensor,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    row_elements: int,
) -> list[AttentionGroup]:
    """Group the requests of one forward.

    Args:
        req_to_token: [max_requests, max_context] int: KV slot of every position of every request.
        rows: [batch] int64: row of each request in ``req_to_token``.
        q_lens: query tokens per request, 0 for none.
        kv_lens: context length per request, its queries included.
        row_elements: elements of K per KV slot, heads times head dimension; weighs padding
            against another call.

    Returns:
        The groups; empty when no request has a query.
    """
    members = list(_split(q_lens, kv_lens, row_elements))
    if len(members) == 1 and len(members[0]) == len(q_lens):
        return [_group(req_to_token, rows, q_lens[0], kv_lens, None)]
    starts = [0, *torch.tensor(q_lens).cumsum(0).tolist()]
    groups = []
    for chosen in members:
        q_len = q_lens[chosen[0]]
        first = torch.tensor([starts[i] for i in chosen])
        tokens = (first[:, None] + torch.arange(q_len)).flatten()
        lengths = [kv_lens[i] for i in chosen]
        groups.append(_group(req_to_token, rows[torch.tensor(chosen)], q_len, lengths, tokens))
    return groups


def _split(q_lens: Sequence[int], kv_lens: Sequence[int], row_elements: int) -> Iterator[list[int]]:
    """Yield the members of each group, as indices into the batch."""
    if _is_even(q_lens, kv_lens, row_elements):
        yield list(range(len(q_lens)))
        return
    order = sorted(
        (i for i, q_len in enumerate(q_lens) if q_len), key=lambda i: (-q_lens[i], -kv_lens[i])
    )
    group: list[int] = []
    padding = 0
    for i in order:
        padding += kv_lens[group[0]] - kv_lens[i] if group else 0
        if group and (
            q_lens[i] != q_lens[group[0]] or _too_padded(padding, q_lens[i], row_elements)
        ):
            yield group
            group, padding = [], 0
        group.append(i)
    if group:
        yield group


def _is_even(q_lens: Sequence[int], kv_lens: Sequence[int], row_elements: int) -> bool:
    """Whether the whole batch is one group: the common case, a decode step or a block."""
    if not q_lens or not q_lens[0] or min(q_lens) != max(q_lens):
        return False
    return not _too_padded(len(kv_lens) * max(kv_lens) - sum(kv_lens), q_lens[0], row_elements)


def _too_padded(rows: int, q_len: int, row_elements: int) -> bool:
    return rows * row_elements * (1 + q_len / QUERIES_PER_GATHER) > SPLIT_ELEMENTS


def _group(
    req_to_token: Tensor, rows: Tensor, q_len: int, kv_lens: Sequence[int], tokens: Tensor | None
) -> AttentionGroup:
    max_kv_len = max(kv_lens)
    padded = min(kv_lens) < max_kv_len
    kv_len = torch.tensor(kv_lens)
    if padded:
        # A column past a request's end repeats its own last slot. It is masked out, but must not
        # hold another request's data: zero weight times NaN is NaN.
        position = torch.minimum(torch.arange(max_kv_len), kv_len[:, None] - 1)
        slots = req_to_token[rows[:, None], position]
    elif len(kv_lens) == 1:
        slots = req_to_token[rows, :max_kv_len]
    else:
        slots = req_to_token[:, :max_kv_len].index_select(0, rows)
    return AttentionGroup(q_len, kv_len, slots.flatten().long(), max_kv_len, padded, tokens, {})


def attend(
    plan: Sequence[AttentionGroup],
    query: Tensor,
    kv: Tensor,
    scale: float,
    causal: bool = True,
    window_left: int = FULL_CONTEXT,
) -> Tensor:
    """Attend with every query of a planned batch.

    Args:
        plan: the groups of the batch.
        query: [tokens, heads, dim], the queries of the requests in batch order.
        kv: [2, slots, kv_heads, dim], the layer's keys and values, with those of the query tokens;
            in any dtype, such as that of --speculative-draft-kv-cache-dtype.
        scale: factor on the scores.
        causal: whether a query attends only to positions up to its own; False: to its whole
            context.
        window_left: positions before its own to which a query attends; ``FULL_CONTEXT``: all.

    Returns:
        [tokens, heads * dim]; rows of queries outside every group are undefined.
    """
    tokens, heads, dim = query.shape
    if len(plan) == 1 and plan[0].tokens is None:
        return _attend_group(plan[0], query, kv, scale, causal, window_left)
    out = query.new_empty(tokens, heads * dim)
    for group in plan:
        index = group.tokens if group.tokens is not None else torch.arange(tokens)
        part = _attend_group(group, query.index_select(0, index), kv, scale, causal, window_left)
        out.index_copy_(0, index, part)
    return out


def _attend_group(
    group: AttentionGroup, query: Tensor, kv: Tensor, scale: float, causal: bool, window_left: int
) -> Tensor:
    tokens, heads, dim = query.shape
    _, _, kv_heads, _ = kv.shape
    key = (causal, window_left)
    if key not in group.masks:
        group.masks[key] = _mask(group, causal, window_left, query.dtype)
    # [2, requests, kv_heads, max_kv_len, dim]: one gather for keys and values
    context = kv.index_select(1, group.slots).to(query.dtype)
    context = context.view(2, -1, group.max_kv_len, kv_heads, dim).transpose(2, 3)
    out = F.scaled_dot_product_attention(
        query.view(-1, group.q_len, heads, dim).transpose(1, 2),
        context[0],
        context[1],
        attn_mask=group.masks[key],
        scale=scale,
        enable_gqa=heads != kv_heads,
    )
    return out.transpose(1, 2).reshape(tokens, heads * dim)


def _mask(
    group: AttentionGroup, causal: bool, window_left: int, dtype: torch.dtype
) -> Tensor | None:
    """Additive mask [requests, 1, q_len, max_kv_len]; None when nothing is masked."""
    key = torch.arange(group.max_kv_len)
    query = group.kv_len[:, None] - group.q_len + torch.arange(group.q_len)
    query = query[..., None]  # [requests, q_len, 1]: position of each query
    seen = []
    if causal and group.q_len > 1:
        seen.append(key <= query)  # also masks the padding, which is after the last query
    elif group.padded:
        seen.append((key < group.kv_len[:, None, None]).expand(-1, group.q_len, -1))
    if FULL_CONTEXT < window_left < group.max_kv_len - 1:
        seen.append(key >= query - window_left)
    if not seen:
        return None
    visible = seen[0] if len(seen) == 1 else seen[0] & seen[1]
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
    return mask.unsqueeze(1)
