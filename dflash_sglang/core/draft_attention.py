"""The attention mask of a drafted block, as a window of a paged attention kernel.

    context            read                      block
    0 ... start-1 | start ............ prefix-1 | prefix ... prefix+D-1
                  |<----------- kv_len --------------------->|

A block is the end of its keys, so a kernel that aligns queries and keys at their ends places block
position i at key kv_len - D + i. FlashInfer's does, and masks by that place: `window_left` hides
keys more than so many places behind a query, in causal and in non-causal calls alike, and
non-causal calls hide nothing ahead. So every position gets its own window from lengths alone,
without a mask buffer, and what is not read at all only has to lie behind the first position's
window.

Source of the kernel's rule: `DefaultAttention` in flashinfer/attention/variants.cuh, and
`logits_mask` in prefill.cuh beside it (FlashInfer 0.7.2).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class AttentionWindow(NamedTuple):
    """Which keys the block positions see in a layer."""

    window_left: int  # how far behind its position a query sees; -1: everything
    causal: bool  # later positions of the block are hidden


class Shape(NamedTuple):
    """The sizes and dtypes of a drafter's attention that a plan needs, on one rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of the scores
    soft_cap: float  # of the scores; 0: none
    dtype: torch.dtype  # of queries and outputs
    kv_dtype: torch.dtype  # of the cache


class PagedLayout(NamedTuple):
    """Where the keys of a batch of blocks are; all on the host."""

    starts: Tensor  # [bs] int32, the first position that is read
    kv_lens: Tensor  # [bs] int32, positions that are read, the block included
    qo_indptr: Tensor  # [bs + 1] int32, first row of each request's queries
    kv_indptr: Tensor  # [bs + 1] int32, first page of each request
    last_page_lens: Tensor  # [bs] int32, positions in the last page, 1 .. page_size


def paged_layout(
    prefix_lens: Tensor, block_size: int, window: AttentionWindow, page_size: int = 1
) -> PagedLayout:
    """Lay out a batch of blocks.

    Args:
        prefix_lens: [bs] integers on the host, exact: committed tokens of each request.
        block_size: D.
        window: of the layers that the layout is for.
        page_size: positions to a page; reading starts at the beginning of one.
    """
    prefix_lens = prefix_lens.to(torch.int32)
    starts = torch.zeros_like(prefix_lens)
    if window.window_left >= 0:
        starts = (prefix_lens - window.window_left).clamp(min=0)
        starts -= starts % page_size
    kv_lens = prefix_lens - starts + block_size
    pages = (kv_lens + page_size - 1) // page_size
    rows = torch.arange(len(prefix_lens) + 1, dtype=torch.int32) * block_size
    kv_indptr = torch.nn.functional.pad(pages.cumsum(0, dtype=torch.int32), (1, 0))
    return PagedLayout(starts, kv_lens, rows, kv_indptr, (kv_lens - 1) % page_size + 1)


def plan(
    wrapper: Any,
    layout: PagedLayout,
    kv_indices: Tensor,
    window: AttentionWindow,
    shape: Shape,
    page_size: int = 1,
) -> None:
    """Plan a FlashInfer wrapper from a layout; the device is not read, so nothing waits for it.

    Args:
        wrapper: a `BatchPrefillWithPagedKVCacheWrapper` without a mask buffer: with one it would
            take every call for one with a mask.
        layout: of this step.
        kv_indices: [pages] int32 on the device, page of every kv_indptr entry. A wrapper that is
            captured reads its own buffer; for that, an empty tensor, and the caller fills it.
        window: as in the layout.
        shape: of the drafter's attention.
        page_size: as in the layout.
    """
    wrapper.plan(
        layout.qo_indptr,
        layout.kv_indptr,
        kv_indices,
        layout.last_page_lens,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        page_size,
        causal=window.causal,
        # Here and not at the run: it chooses the kernel that has windows at all.
        window_left=window.window_left,
        sm_scale=shape.scale,
        logits_soft_cap=shape.soft_cap,
        q_data_type=shape.dtype,
        kv_data_type=shape.kv_dtype,
    )
