"""Lay out the next draft block of every request: token ids, positions and KV slots."""

from torch import Tensor

from dflash_kernels.dispatch import check_shape, runs_triton
from dflash_kernels.prepare_block import reference
from dflash_kernels.types import Block

__all__ = ["prepare_block"]


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

    With L the prefix length of request r, block position i has

        id_i = anchor if i = 0 else mask,    position_i = L + i,    slot_i = table[row_r, L + i]

    Args:
        anchor_ids: [bs] int64, the last committed token of each request; not yet in the KV cache.
        prefix_lens: [bs] int64, tokens in the KV cache; also the anchor's position.
        req_pool_indices: [bs] int64, rows of `req_to_token`.
        req_to_token: [rows, columns] int32, KV slot of each position of each request; its columns
            are adjacent in memory. The scheduler has reserved slots for positions up to
            ``prefix + block_size - 1``.
        block_size: positions to lay out, the anchor included.
        mask_token_id: the id that stands for "to be drafted".

    Returns:
        The block; all tensors are new and contiguous.

    Raises:
        ValueError: shapes do not fit each other, the block is empty or has more positions than the
            table, or the table's columns are not adjacent. Positions past the table are not looked
            for: that would wait for the device.

    Example:
        >>> table = torch.arange(20, 30, dtype=torch.int32)[None]
        >>> anchor, prefix, row = torch.tensor([7]), torch.tensor([4]), torch.tensor([0])
        >>> block = prepare_block(anchor, prefix, row, table, block_size=3, mask_token_id=99)
        >>> block.ids.tolist(), block.positions.tolist(), block.slots.tolist()
        ([[7, 99, 99]], [[4, 5, 6]], [[24, 25, 26]])
    """
    bs = anchor_ids.shape[0]
    check_shape("prefix_lens", prefix_lens, bs)
    check_shape("req_pool_indices", req_pool_indices, bs)
    if not 1 <= block_size <= req_to_token.shape[1] or req_to_token.stride(1) != 1:
        raise ValueError(
            f"expected a table of at least block_size={block_size} >= 1 adjacent columns,"
            f" got {tuple(req_to_token.shape)} with strides {req_to_token.stride()}"
        )
    given = (anchor_ids, prefix_lens, req_pool_indices, req_to_token)
    if not runs_triton(anchor_ids):
        return reference.prepare_block(*given, block_size=block_size, mask_token_id=mask_token_id)
    from dflash_kernels.prepare_block import kernel

    return Block(*kernel.prepare_block_op(*given, block_size, mask_token_id))
