"""Torch form of `prepare_block`; runs on every device."""

import torch
from torch import Tensor

from dflash_kernels.types import Block


def prepare_block(
    anchor_ids: Tensor,
    prefix_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    *,
    block_size: int,
    mask_token_id: int,
) -> Block:
    """Reference of `dflash_kernels.prepare_block.prepare_block`."""
    bs = anchor_ids.shape[0]
    positions = prefix_lens[:, None]
    if block_size == 1:  # plain decoding: fewer ops, since nothing hides their cost there
        ids = anchor_ids.to(torch.int64)[:, None]
        positions = positions.clone()  # the lengths may move on before they are used
    else:
        ids = anchor_ids.new_full((bs, block_size), mask_token_id, dtype=torch.int64)
        ids[:, 0] = anchor_ids
        offsets = torch.arange(block_size, dtype=torch.int64, device=prefix_lens.device)
        positions = positions + offsets
    slots = req_to_token[req_pool_indices[:, None], positions].to(torch.int64)
    return Block(ids=ids, positions=positions, slots=slots)
