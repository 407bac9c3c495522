"""Torch form of `prepare_block`; runs on every device."""

from typing import NamedTuple

import torch
from torch import Tensor


class Block(NamedTuple):
    """One block a request: the anchor, then the positions to draft.

                 committed prefix          block
    position   0 ........ prefix-1 | prefix  prefix+1 ... prefix+D-1
    token id   (in the KV cache)   | anchor  mask     ... mask
    """

    ids: Tensor  # [bs, block_size] int64, column 0 is the anchor, the rest the mask token
    positions: Tensor  # [bs, block_size] int64, absolute
    slots: Tensor  # [bs, block_size] int64, KV slots the block writes


def prepare_block(
    anchor_ids: Tensor,
    prefix_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    *,
    block_size: int,
    mask_token_id: int,
) -> Block:
    """Lay out one block per request, without a host read.

    Args:
        anchor_ids: [bs] int64, the last committed token of each request; not yet in the KV cache.
        prefix_lens: [bs] int64, tokens in the KV cache; also the anchor's position.
        req_pool_indices: [bs] int64, rows of `req_to_token`.
        req_to_token: [rows, width] int32, KV slot of each position of each request. The scheduler
            has reserved slots for positions up to ``prefix + block_size - 1``.
        block_size: D, the anchor included.
        mask_token_id: id that stands for "to be drafted".

    Returns:
        The block; all tensors are new and contiguous.
    """
    bs = anchor_ids.shape[0]
    ids = anchor_ids.new_full((bs, block_size), mask_token_id, dtype=torch.int64)
    ids[:, 0] = anchor_ids
    offsets = torch.arange(block_size, dtype=torch.int64, device=prefix_lens.device)
    positions = prefix_lens[:, None] + offsets
    slots = req_to_token[req_pool_indices[:, None], positions].to(torch.int64)
    return Block(ids=ids, positions=positions, slots=slots)
