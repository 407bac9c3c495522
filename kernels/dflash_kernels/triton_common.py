"""Triton helpers that several ops share: rows of logits, noise of a seed, and the commit.

The only module beside the ops' own kernel.py that imports triton.
"""

import triton
import triton.language as tl
from torch import Tensor

from dflash_kernels.types import Acceptance

NO_ID = tl.constexpr(2**31 - 1)
LEAST_LANES = 16


def lanes_of(width: int) -> int:
    """Lanes of a block: a power of two, and no fewer than 16, so that few widths differ by them."""
    return max(LEAST_LANES, triton.next_power_of_2(width))


def rows_of(matrix: Tensor) -> Tensor:
    """`matrix` with adjacent columns; rows may lie apart, as in a slice of columns."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


@triton.jit
def load_logits(logits_ptr, row, index, num_ids, row_stride):
    """A tile of one row as float32; -inf where the logit is NaN or past the vocabulary."""
    # int64: row * stride passes 2**31 with 9k rows of 248k ids.
    base = logits_ptr + row.to(tl.int64) * row_stride
    x = tl.load(base + index, mask=index < num_ids, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def order_of(value):
    """int32 in the order of float32 values; -0 equals +0."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    # Negative floats order backwards by their bits.
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def commit(
    request,
    column,
    accepted,
    draft,
    chosen,
    prefix_ptr,
    accept_ptr,
    commit_ptr,
    bonus_ptr,
    lens_ptr,
    output_ptr,
    width,
    WRITE_OUTPUT: tl.constexpr,
):
    """Store one request's acceptance.

    All tiles are [lanes]: the drafts, the verifier's `chosen` ids, and in `accepted` which drafts
    match, each taken alone; false from column width - 1 on, where there is none.
    """
    accept_len = tl.min(tl.where(accepted, width, column), 0)  # the first that is not
    bonus = tl.sum(tl.where(column == accept_len, chosen, 0), 0)
    tl.store(accept_ptr + request, accept_len)
    tl.store(commit_ptr + request, accept_len + 1)
    tl.store(bonus_ptr + request, bonus)
    tl.store(lens_ptr + request, tl.load(prefix_ptr + request) + accept_len + 1)
    if WRITE_OUTPUT:
        output = tl.where(column < accept_len, draft, chosen)
        tl.store(output_ptr + request * width + column, output, mask=column < width)


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


@triton.jit(
    do_not_specialize=(
        "draft_ptr",
        "prefix_ptr",
        "limit_ptr",
        "draft_stride",
        "width",
    )
)
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
    width,
    LANES: tl.constexpr,
    TILES: tl.constexpr,
):
    """Take the best tile's token of each of a request's rows, and commit what matches."""
    request = tl.program_id(0)
    column = tl.arange(0, LANES)
    tile = tl.arange(0, TILES)
    at = (request * width + column[:, None]) * tiles + tile[None, :]
    given = (column[:, None] < width) & (tile[None, :] < tiles)
    score = tl.load(scores_ptr + at, mask=given, other=float("-inf"))
    ids = tl.load(ids_ptr + at, mask=given, other=NO_ID)
    first = tl.where(score == tl.max(score, 1)[:, None], ids, NO_ID)
    chosen = tl.min(first, 1).to(tl.int64)

    has_draft = column < width - 1
    draft = tl.load(draft_ptr + request * draft_stride + column + 1, mask=has_draft, other=0)
    accepted = has_draft & (draft == chosen)
    if limit_ptr is not None:
        accepted = accepted & (column < tl.load(limit_ptr + request))
    commit(
        request,
        column,
        accepted,
        draft,
        chosen,
        prefix_ptr,
        accept_ptr,
        commit_ptr,
        bonus_ptr,
        lens_ptr,
        output_ptr,
        width,
        True,
    )


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
            width,
            LANES=lanes_of(width),
            TILES=triton.next_power_of_2(tiles),
            num_warps=4,
        )
    return got
