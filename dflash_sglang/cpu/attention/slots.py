"""Reads and writes of ``req_to_token`` in torch, which are Triton kernels in SGLang."""

from __future__ import annotations

import torch
from torch import Tensor


def assign_slots(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    batch_size: int,
) -> None:
    """Write newly allocated KV slots to positions ``start`` to ``end - 1`` of each request.

    Args:
        req_pool_indices: [batch] int: the requests' rows.
        req_to_token: [max_requests, max_context] int32, written in place.
        start_offset: [batch] int: first position to write.
        end_offset: [batch] int: one past the last.
        out_cache_loc: [sum(end - start)] int64: the KV slots, in request order.
        batch_size: number of requests.
    """
    lengths = (end_offset - start_offset)[:batch_size]
    rows = req_pool_indices[:batch_size].repeat_interleave(lengths)
    first = (start_offset[:batch_size] - (lengths.cumsum(0) - lengths)).repeat_interleave(lengths)
    positions = first + torch.arange(rows.numel())
    req_to_token[rows, positions] = out_cache_loc.to(req_to_token.dtype)


def block_slots(
    *,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    batch_size: int,
    draft_token_num: int,
    device: torch.device | str,
) -> Tensor:
    """KV slots of a block of positions per request.

    Args:
        req_pool_indices: [batch] int: the requests' rows.
        req_to_token: [max_requests, max_context] int32.
        start_offset: [batch] int: first position of each block.
        end_offset: [batch] int: one past the last; ``start_offset + draft_token_num``.
        batch_size: number of requests.
        draft_token_num: positions per block.
        device: of the result; the CPU here.

    Returns:
        [batch * draft_token_num] int64.
    """
    positions = start_offset.long()[:, None] + torch.arange(draft_token_num)
    return req_to_token[req_pool_indices.long()[:, None], positions].flatten().long()
