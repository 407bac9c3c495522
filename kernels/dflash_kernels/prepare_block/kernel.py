"""Triton form of `prepare_block`: one program a request."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_kernels.dispatch import launch_op
from dflash_kernels.triton_common import lanes_of
from dflash_kernels.types import Block


@triton.jit(
    do_not_specialize=(
        "anchor_ptr",
        "prefix_ptr",
        "row_ptr",
        "table_ptr",
        "table_stride",
        "mask_token_id",
        "block_size",
    )
)
def _prepare_block(
    anchor_ptr,
    prefix_ptr,
    row_ptr,
    table_ptr,
    ids_ptr,
    positions_ptr,
    slots_ptr,
    table_stride,
    mask_token_id,
    block_size,
    LANES: tl.constexpr,
):
    request = tl.program_id(0)
    column = tl.arange(0, LANES)
    in_block = column < block_size
    position = tl.load(prefix_ptr + request).to(tl.int64) + column
    # int64: a row times the table's width passes 2**31 with 8k requests of 256k tokens.
    row = tl.load(row_ptr + request).to(tl.int64) * table_stride
    slot = tl.load(table_ptr + row + position, mask=in_block, other=0).to(tl.int64)
    anchor = tl.load(anchor_ptr + request).to(tl.int64)
    out = request * block_size + column
    tl.store(ids_ptr + out, tl.where(column == 0, anchor, mask_token_id), mask=in_block)
    tl.store(positions_ptr + out, position, mask=in_block)
    tl.store(slots_ptr + out, slot, mask=in_block)


def prepare_block(
    anchor_ids: Tensor,
    prefix_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    *,
    block_size: int,
    mask_token_id: int,
) -> Block:
    """Launch of `dflash_kernels.prepare_block.prepare_block`."""
    bs = anchor_ids.shape[0]
    block = Block(*(_new(anchor_ids, bs, block_size) for _ in Block._fields))
    if bs:
        _prepare_block[(bs,)](
            anchor_ids.contiguous(),
            prefix_lens.contiguous(),
            req_pool_indices.contiguous(),
            req_to_token,
            *block,
            req_to_token.stride(0),
            mask_token_id,
            block_size,
            LANES=lanes_of(block_size),
            num_warps=1,
        )
    return block


def _new(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device=like.device)


@launch_op("dflash::prepare_block")
def prepare_block_op(
    anchor_ids: Tensor,
    prefix_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    block_size: int,
    mask_token_id: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The launch as a custom op: opaque to a capture, and known to fake tensors."""
    return prepare_block(
        anchor_ids,
        prefix_lens,
        req_pool_indices,
        req_to_token,
        block_size=block_size,
        mask_token_id=mask_token_id,
    )


@prepare_block_op.register_fake
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
