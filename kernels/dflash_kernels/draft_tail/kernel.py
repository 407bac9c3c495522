"""Triton form of `draft_tail`: a program for each tile of a row, then one for each row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_kernels.dispatch import launch_op
from dflash_kernels.triton_common import load_logits, order_of, rows_of
from dflash_kernels.types import Tail

TILE = 4096  # columns a program reads: 64 bytes of bfloat16 a thread in flight

# Below the key of every value, -inf included.
NO_KEY = tl.constexpr(-(2**63))


@triton.jit
def key_of(value, index):
    """[...] int64 whose maximum is the largest float32 value, the smallest index among equals."""
    # The complement within 31 bits: a smaller index is a larger number.
    return (order_of(value).to(tl.int64) << 32) | (index ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit
def value_of(key):
    """The float32 value of a key."""
    ordered = (key >> 32).to(tl.int32)
    bits = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    value = bits.to(tl.float32, bitcast=True)
    return tl.where(key == NO_KEY, float("-inf"), value)


@triton.jit
def index_of(key):
    """The index of a key, int64."""
    return (key & 0x7FFFFFFF) ^ 0x7FFFFFFF


@triton.jit
def _top_of_tile(
    logits_ptr,
    keys_ptr,
    sums_ptr,
    num_ids,
    row_stride,
    TOP: tl.constexpr,
    TILE: tl.constexpr,
):
    row, tile = tl.program_id(0), tl.program_id(1)
    index = tile * TILE + tl.arange(0, TILE)
    x = load_logits(logits_ptr, row, index, num_ids, row_stride)
    peak = tl.max(x, 0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    out = row * tl.num_programs(1) + tile
    tl.store(sums_ptr + out, tl.sum(tl.exp(x - shift), 0))
    key = tl.where(index < num_ids, key_of(x, index), NO_KEY)
    for rank in range(TOP):
        best = tl.max(key, 0)
        tl.store(keys_ptr + out * TOP + rank, best)
        key = tl.where(key == best, NO_KEY, key)


@triton.jit
def _top_of_row(
    keys_ptr,
    sums_ptr,
    ids_ptr,
    values_ptr,
    lse_ptr,
    tiles,
    TOP: tl.constexpr,
    TILES: tl.constexpr,
    KEYS: tl.constexpr,
):
    row = tl.program_id(0)
    tile = tl.arange(0, TILES)
    in_row = tile < tiles
    first = tl.load(keys_ptr + (row * tiles + tile) * TOP, mask=in_row, other=NO_KEY)
    sums = tl.load(sums_ptr + row * tiles + tile, mask=in_row, other=0.0)
    peaks = value_of(first)
    peak = tl.max(peaks, 0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(lse_ptr + row, shift + tl.log(tl.sum(sums * tl.exp(peaks - shift), 0)))
    place = tl.arange(0, KEYS)
    key = tl.load(keys_ptr + row * tiles * TOP + place, mask=place < tiles * TOP, other=NO_KEY)
    for rank in range(TOP):
        best = tl.max(key, 0)
        tl.store(ids_ptr + row * TOP + rank, index_of(best))
        tl.store(values_ptr + row * TOP + rank, value_of(best))
        key = tl.where(key == best, NO_KEY, key)


def draft_tail(logits: Tensor, *, num_ids: int, top: int = 1) -> Tail:
    """Launch of `dflash_kernels.draft_tail.draft_tail`."""
    logits = rows_of(logits)
    rows, device = logits.shape[0], logits.device
    # Tiles do not depend on the batch, so neither does the rounding of a row's sums.
    tiles = triton.cdiv(num_ids, TILE)
    keys = torch.empty((rows, tiles, top), dtype=torch.int64, device=device)
    sums = torch.empty((rows, tiles), dtype=torch.float32, device=device)
    ids = torch.empty((rows, top), dtype=torch.int64, device=device)
    values = torch.empty((rows, top), dtype=torch.float32, device=device)
    lse = torch.empty(rows, dtype=torch.float32, device=device)
    if rows:
        _top_of_tile[(rows, tiles)](
            logits, keys, sums, num_ids, logits.stride(0), TOP=top, TILE=TILE, num_warps=4
        )
        _top_of_row[(rows,)](
            keys,
            sums,
            ids,
            values,
            lse,
            tiles,
            TOP=top,
            TILES=triton.next_power_of_2(tiles),
            KEYS=triton.next_power_of_2(tiles * top),
            num_warps=4,
        )
    return Tail(ids, values, lse)


@launch_op("dflash::draft_tail")
def draft_tail_op(logits: Tensor, num_ids: int, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """The launch as a custom op: opaque to a capture, and known to fake tensors."""
    ids, values, lse = draft_tail(logits, num_ids=num_ids, top=top)
    assert lse is not None
    return ids, values, lse


@draft_tail_op.register_fake
def _(logits: Tensor, num_ids: int, top: int) -> tuple[Tensor, Tensor, Tensor]:
    ids = logits.new_empty((logits.shape[0], top), dtype=torch.int64)
    return (
        ids,
        torch.empty_like(ids, dtype=torch.float32),
        ids.new_empty(logits.shape[0], dtype=torch.float32),
    )
