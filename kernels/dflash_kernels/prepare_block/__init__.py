"""Lay out the next draft block of every request: token ids, positions and KV slots."""

import torch
from torch import Tensor

from dflash_kernels.dispatch import runs_triton
from dflash_kernels.prepare_block import reference
from dflash_kernels.types import Block

__all__ = ["narrow_block", "prepare_block"]


def prepare_block(
    anchor_ids: Tensor,
    prefix_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    *,
    block_size: int,
    mask_token_id: int,
) -> Block:
    """Lay out one block per request, in one launch and without a host read.

    With L the prefix length of request r, column i of its block is

        id_i = anchor if i = 0 else mask,    position_i = L + i,    slot_i = table[row_r, L + i]

    Args:
        anchor_ids: [bs] int64, the last committed token of each request; not yet in the KV cache.
        prefix_lens: [bs] int64, tokens in the KV cache; also the anchor's position.
        req_pool_indices: [bs] int64, rows of `req_to_token`.
        req_to_token: [rows, width] int32, KV slot of each position of each request; its columns are
            adjacent in memory. The scheduler has reserved slots for positions up to
            ``prefix + block_size - 1``.
        block_size: D, the anchor included.
        mask_token_id: id that stands for "to be drafted".

    Returns:
        The block; all tensors are new and contiguous.
    """
    if runs_triton(anchor_ids):
        return Block(
            *_prepare_block(
                anchor_ids, prefix_lens, req_pool_indices, req_to_token, block_size, mask_token_id
            )
        )
    return reference.prepare_block(
        anchor_ids,
        prefix_lens,
        req_pool_indices,
        req_to_token,
        block_size=block_size,
        mask_token_id=mask_token_id,
    )


def narrow_block(block: Block, width: int) -> Block:
    """The first `width` columns of a block, contiguous, in one launch.

    What a verify narrower than the drafted block takes, whose ids are then the drafted ones:
    ``narrow_block(block._replace(ids=draft_ids), width)``.

    Args:
        block: [bs, block_size] int64 each, contiguous.
        width: columns to keep, the anchor included.

    Returns:
        [bs, width] each; the block itself when it has this width already.

    Raises:
        ValueError: `width` is below 1 or above the block's size.
    """
    block_size = block.ids.shape[1]
    if not 1 <= width <= block_size:
        raise ValueError(f"expected 1 <= width <= {block_size}, the block's size; got {width}")
    if width == block_size:
        return block
    if runs_triton(block.ids):
        return Block(*_narrow_block(block.ids, block.positions, block.slots, width))
    return reference.narrow_block(block, width)


@torch.library.custom_op("dflash::prepare_block", mutates_args=())
def _prepare_block(
    anchor_ids: Tensor,
    prefix_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    block_size: int,
    mask_token_id: int,
) -> tuple[Tensor, Tensor, Tensor]:
    from dflash_kernels.prepare_block import kernel

    return kernel.prepare_block(
        anchor_ids,
        prefix_lens,
        req_pool_indices,
        req_to_token,
        block_size=block_size,
        mask_token_id=mask_token_id,
    )


@_prepare_block.register_fake
def _(
    anchor_ids: Tensor,
    prefix_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    block_size: int,
    mask_token_id: int,
) -> tuple[Tensor, Tensor, Tensor]:
    ids = anchor_ids.new_empty((anchor_ids.shape[0], block_size), dtype=torch.int64)
    return ids, torch.empty_like(ids), torch.empty_like(ids)


@torch.library.custom_op("dflash::narrow_block", mutates_args=())
def _narrow_block(
    ids: Tensor, positions: Tensor, slots: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    from dflash_kernels.prepare_block import kernel

    return kernel.narrow_block(Block(ids, positions, slots), width)


@_narrow_block.register_fake
def _(ids: Tensor, positions: Tensor, slots: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    narrow = ids.new_empty((ids.shape[0], width))
    return narrow, torch.empty_like(narrow), torch.empty_like(narrow)
