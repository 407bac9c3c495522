"""Triton form of `accept_sampled`: a program for each tile of a row, then one for each request."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_kernels.dispatch import launch_op
from dflash_kernels.triton_common import (
    accept_best,
    best_of_tile,
    hash_of_row,
    rows_of,
)
from dflash_kernels.types import Acceptance

TILE = 4096  # columns a program reads


@triton.jit(
    do_not_specialize=("prefix_ptr", "temperature_ptr", "seed_ptr", "width"),
)
def _sample_tile(
    logits_ptr,
    prefix_ptr,
    temperature_ptr,
    seed_ptr,
    scores_ptr,
    ids_ptr,
    num_ids,
    row_stride,
    width,
    TILE: tl.constexpr,
):
    row, tile = tl.program_id(0), tl.program_id(1)
    request = row // width
    position = tl.load(prefix_ptr + request) + row % width
    row_hash = hash_of_row(tl.load(seed_ptr + request), position)
    temperature = tl.load(temperature_ptr + request)
    best, best_id = best_of_tile(
        logits_ptr, row, tile, temperature, row_hash, num_ids, row_stride, TILE
    )
    out = row * tl.num_programs(1) + tile
    tl.store(scores_ptr + out, best)
    tl.store(ids_ptr + out, best_id)


def accept_sampled(
    logits: Tensor,
    draft_ids: Tensor,
    prefix_lens: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    *,
    limit: Tensor | None = None,
) -> Acceptance:
    """Launch of `dflash_kernels.accept_sampled.accept_sampled`."""
    (bs, width), num_ids = draft_ids.shape, logits.shape[1]
    logits, draft_ids, prefix_lens = rows_of(logits), rows_of(draft_ids), prefix_lens.contiguous()
    tiles = triton.cdiv(num_ids, TILE)
    scores = torch.empty((bs * width, tiles), dtype=torch.float64, device=logits.device)
    ids = torch.empty((bs * width, tiles), dtype=torch.int32, device=logits.device)
    if bs:
        _sample_tile[(bs * width, tiles)](
            logits,
            prefix_lens,
            temperatures.contiguous(),
            seeds.contiguous(),
            scores,
            ids,
            num_ids,
            logits.stride(0),
            width,
            TILE=TILE,
            num_warps=4,
        )
    return accept_best(scores, ids, draft_ids, prefix_lens, limit)


@launch_op("dflash::accept_sampled")
def accept_sampled_op(
    logits: Tensor,
    draft_ids: Tensor,
    prefix_lens: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    limit: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The launch as a custom op: opaque to a capture, and known to fake tensors."""
    return accept_sampled(logits, draft_ids, prefix_lens, temperatures, seeds, limit=limit)


@accept_sampled_op.register_fake
def _(
    logits: Tensor,
    draft_ids: Tensor,
    prefix_lens: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    limit: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return Acceptance.empty(draft_ids, prefix_lens)
