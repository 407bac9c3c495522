"""Triton form of `accept_sampled`: a program for each tile of a row, then one for each request."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_kernels.accept_match.kernel import commit, rows_of
from dflash_kernels.draft_tail.kernel import load_logits
from dflash_kernels.types import Acceptance

TILE = 4096  # columns a program reads

NO_ID = tl.constexpr(2**31 - 1)


@triton.jit
def mix(h, k):
    """One word of MurmurHash3; uint32 products wrap."""
    k *= 0xCC9E2D51
    k = (k << 15) | (k >> 17)
    h ^= k * 0x1B873593
    h = (h << 13) | (h >> 19)
    return h * 5 + 0xE6546B64


@triton.jit
def hash_of_row(seed, position):
    """State after the words that a row shares: seed_low, seed_high, position."""
    h = mix(seed.to(tl.uint32) * 0, seed.to(tl.uint32))
    h = mix(h, (seed >> 32).to(tl.uint32))
    return mix(h, position.to(tl.uint32))


@triton.jit
def hash_of(row_hash, index):
    """The hash of a row's column, uint32."""
    h = mix(row_hash, index.to(tl.uint32)) ^ 16
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def gumbel32(hashed):
    """-log(-log(u)) in float32, within 4e-6 of `gumbel64`."""
    # Near 1, u in float32 keeps no digits of -log(u); 1 - u has them all. There -log(u) is
    # 2 atanh(s), s = (1-u) / (1+u): four terms are exact to 2e-8 up to 1 - u = 1/4.
    rest = (hashed ^ 0xFFFFFFFF).to(tl.float32) * 2.3283064365386963e-10
    s = rest / (2.0 - rest)
    square = s * s
    series = s * (2.0 + square * (2.0 / 3 + square * (2.0 / 5 + square * (2.0 / 7))))
    u = hashed.to(tl.float32) * 2.3283064365386963e-10
    exponential = tl.where(rest < 0.25, series, -tl.log(u))
    noise = -tl.log(tl.maximum(exponential, 2.3283064365386963e-10))
    return tl.maximum(noise, -709.782712893384)  # u = 0


@triton.jit
def gumbel64(hashed):
    """-log(-log(u)) in float64, as SGLang computes it."""
    u = hashed.to(tl.float64) / tl.full((), 4294967295, tl.float64)
    noise = -tl.log(tl.maximum(-tl.log(u), tl.full((), 2.0**-32, tl.float64)))
    return tl.maximum(noise, tl.full((), -709.782712893384, tl.float64))


@triton.jit
def best_of_tile(
    logits_ptr,
    row,
    tile,
    temperature,
    row_hash,
    num_ids,
    row_stride,
    TILE: tl.constexpr,
):
    """The best score of a tile in float64 and its id; temperature 0: without noise."""
    drawn = temperature > 0
    divisor = tl.where(drawn, temperature, 1.0)
    index = tile * TILE + tl.arange(0, TILE)
    x = load_logits(logits_ptr, row, index, num_ids, row_stride)
    score = x * (1.0 / divisor)
    score += tl.where(drawn, gumbel32(hash_of(row_hash, index)), 0.0)

    # float32 finds the candidates, float64 decides: one candidate, seldom two. The slack is twice
    # the error of a score: of the noise, 4e-6, and 3e-7 of logit and sum, which noise can pull at
    # most 23 apart.
    peak = tl.max(score, 0)
    slack = tl.where(drawn, 1e-6 * (tl.abs(peak) + 32.0), 0.0)
    near = (score > float("-inf")) & (score >= peak - slack)
    best = tl.full((), float("-inf"), tl.float64)
    best_id = tile * TILE
    candidate = tl.min(tl.where(near, index, NO_ID), 0)
    while candidate < NO_ID:
        logit = tl.load(logits_ptr + row.to(tl.int64) * row_stride + candidate).to(tl.float32)
        exact = tl.div_rn(logit, divisor).to(tl.float64)
        exact += tl.where(drawn, gumbel64(hash_of(row_hash, candidate)), 0.0)
        best_id = tl.where(exact > best, candidate, best_id)
        best = tl.maximum(exact, best)
        near = near & (index > candidate)
        # Of a greedy row's equal logits the first is the answer.
        candidate = tl.where(drawn, tl.min(tl.where(near, index, NO_ID), 0), NO_ID)
    return best, best_id


@triton.jit
def _sample_tile(
    logits_ptr,
    prefix_ptr,
    temperature_ptr,
    seed_ptr,
    scores_ptr,
    ids_ptr,
    num_ids,
    row_stride,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    row, tile = tl.program_id(0), tl.program_id(1)
    request = row // WIDTH
    position = tl.load(prefix_ptr + request) + row % WIDTH
    row_hash = hash_of_row(tl.load(seed_ptr + request), position)
    temperature = tl.load(temperature_ptr + request)
    best, best_id = best_of_tile(
        logits_ptr, row, tile, temperature, row_hash, num_ids, row_stride, TILE
    )
    out = row * tl.num_programs(1) + tile
    tl.store(scores_ptr + out, best)
    tl.store(ids_ptr + out, best_id)


@triton.jit
def accept_request(
    scores_ptr,
    ids_ptr,
    draft_ptr,
    prefix_ptr,
    limit_ptr,
    accept_ptr,
    commit_ptr,
    bonus_ptr,
    lens_ptr,
    output_ptr,
    draft_stride,
    tiles,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    TILES: tl.constexpr,
):
    """Of each of a request's rows the best tile's token, and the acceptance that follows."""
    request = tl.program_id(0)
    column = tl.arange(0, LANES)
    tile = tl.arange(0, TILES)
    at = (request * WIDTH + column[:, None]) * tiles + tile[None, :]
    given = (column[:, None] < WIDTH) & (tile[None, :] < tiles)
    score = tl.load(scores_ptr + at, mask=given, other=float("-inf"))
    ids = tl.load(ids_ptr + at, mask=given, other=NO_ID)
    first = tl.where(score == tl.max(score, 1)[:, None], ids, NO_ID)
    target = tl.min(first, 1).to(tl.int64)

    has_draft = column < WIDTH - 1
    draft = tl.load(draft_ptr + request * draft_stride + column + 1, mask=has_draft, other=0)
    accepted = has_draft & (draft == target)
    if limit_ptr is not None:
        accepted = accepted & (column < tl.load(limit_ptr + request))
    commit(
        request,
        column,
        accepted,
        draft,
        target,
        prefix_ptr,
        accept_ptr,
        commit_ptr,
        bonus_ptr,
        lens_ptr,
        output_ptr,
        WIDTH,
        True,
    )


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
            WIDTH=width,
            TILE=TILE,
            num_warps=4,
        )
    return accept_best(scores, ids, draft_ids, prefix_lens, limit)


def accept_best(
    scores: Tensor, ids: Tensor, draft_ids: Tensor, prefix_lens: Tensor, limit: Tensor | None
) -> Acceptance:
    """Launch of `accept_request`.

    Args:
        scores: [bs * width, tiles] float64, of each tile's best token.
        ids: [bs * width, tiles] int32, those tokens.
        draft_ids: [bs, width] int64, adjacent columns.
        prefix_lens: [bs] int64, contiguous.
        limit: [bs] int32, the most drafts a row may accept; None: all.
    """
    (bs, width), tiles = draft_ids.shape, scores.shape[1]
    got = Acceptance.empty(draft_ids, prefix_lens)
    if bs:
        accept_request[(bs,)](
            scores,
            ids,
            draft_ids,
            prefix_lens,
            None if limit is None else limit.contiguous(),
            got.accept_len,
            got.commit_len,
            got.bonus_ids,
            got.new_seq_lens,
            got.output_ids,
            draft_ids.stride(0),
            tiles,
            WIDTH=width,
            LANES=triton.next_power_of_2(width),
            TILES=triton.next_power_of_2(tiles),
            num_warps=4,
        )
    return got
