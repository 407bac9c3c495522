"""Batches over a random pool, and attention by its definition in float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Batch(NamedTuple):
    req_to_token: Tensor  # [max_requests, max_context] int32
    rows: Tensor  # [batch] int64
    q_lens: list[int]
    kv_lens: list[int]
    query: Tensor  # [sum(q_lens), heads, dim]
    kv: Tensor  # [2, slots, kv_heads, dim]


def make_batch(
    q_lens: list[int],
    kv_lens: list[int],
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    page_size: int = 1,
    seed: int = 0,
) -> Batch:
    """Requests in scattered rows and pages; every slot no request uses holds NaN."""
    random = torch.Generator().manual_seed(seed)
    pages_per_request = [-(-kv_len // page_size) for kv_len in kv_lens]
    pages = torch.randperm(sum(pages_per_request) + 3, generator=random) + 1  # page 0: padding
    slots = (len(pages) + 1) * page_size
    kv = torch.full((2, slots, kv_heads, dim), float("nan"))
    req_to_token = torch.zeros(len(q_lens) + 4, max(kv_lens, default=0) + 5, dtype=torch.int32)
    rows = torch.randperm(len(q_lens) + 4, generator=random)[: len(q_lens)]
    used = 0
    for row, kv_len, count in zip(rows.tolist(), kv_lens, pages_per_request, strict=True):
        own = pages[used : used + count]
        used += count
        index = (own[:, None] * page_size + torch.arange(page_size)).flatten()[:kv_len]
        req_to_token[row, :kv_len] = index.int()
        kv[:, index] = torch.randn(2, kv_len, kv_heads, dim, generator=random)
    query = torch.randn(sum(q_lens), heads, dim, generator=random)
    return Batch(req_to_token, rows, q_lens, kv_lens, query, kv)


def attend_by_definition(batch: Batch, scale: float, causal: bool, window_left: int) -> Tensor:
    """[tokens, heads * dim] float64: one query, one head, one visible position at a time."""
    heads, kv_heads = batch.query.shape[1], batch.kv.shape[2]
    out = []
    start = 0
    for row, q_len, kv_len in zip(batch.rows.tolist(), batch.q_lens, batch.kv_lens, strict=True):
        slots = batch.req_to_token[row, :kv_len].long()
        keys, values = batch.kv[:, slots].double()  # [kv_len, kv_heads, dim] each
        for offset in range(q_len):
            own = kv_len - q_len + offset
            seen = [
                position
                for position in range(kv_len)
                if (not causal or position <= own)
                and (window_left < 0 or position >= own - window_left)
            ]
            token = []
            for head in range(heads):
                group = head // (heads // kv_heads)
                scores = keys[seen, group] @ batch.query[start + offset, head].double() * scale
                token.append(scores.softmax(0) @ values[seen, group])
            out.append(torch.cat(token))
        start += q_len
    return torch.stack(out)
