"""Triton form of `accept_filtered`.

One pass over the logits gives normalisers and bounds, a second one the few tokens above the bounds;
from those a program a row finds the kept ones and draws.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_kernels.dispatch import launch_op
from dflash_kernels.triton_common import (
    NO_ID,
    accept_best,
    best_of_tile,
    gumbel64,
    hash_of,
    hash_of_row,
    load_logits,
    order_of,
    rows_of,
)
from dflash_kernels.types import Acceptance, Filters

TILE = 4096  # columns a program reads
PART = 128  # columns of which a maximum and a sum are kept
HALVINGS = tl.constexpr(20)  # of a bound: 40 / 2**20 is 4e-5 of a logit
CAPACITY = 4096  # tokens above the bounds that a row is drawn from; with more it is read again

PARAMETERS = ("temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr")

LOWEST = tl.constexpr(-(2**31))
HIGHEST = tl.constexpr(2**31 - 1)


@triton.jit
def filters_of(request, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, num_ids):
    """A request's parameters, and whether it filters at all."""
    temperature = tl.load(temperature_ptr + request)
    top_k = tl.load(top_k_ptr + request)
    top_p = tl.load(top_p_ptr + request)
    min_p = tl.load(min_p_ptr + request)
    filtered = (temperature > 0) & ((top_k < num_ids) | (top_p < 1) | (min_p > 0))
    return temperature, top_k, top_p, min_p, filtered


@triton.jit(do_not_specialize=("prefix_ptr", "seed_ptr", *PARAMETERS, "width"))
def _scan_tile(
    logits_ptr,
    prefix_ptr,
    temperature_ptr,
    seed_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    scores_ptr,
    ids_ptr,
    peaks_ptr,
    sums_ptr,
    part_peaks_ptr,
    part_sums_ptr,
    num_ids,
    row_stride,
    width,
    TILE: tl.constexpr,
    PART: tl.constexpr,
):
    """Peak, sum and maxima of a filtered row's tile; the best token of another row's."""
    row, tile = tl.program_id(0), tl.program_id(1)
    request = row // width
    temperature, _top_k, _top_p, _min_p, filtered = filters_of(
        request, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, num_ids
    )
    out = row * tl.num_programs(1) + tile
    if filtered:
        index = tile * TILE + tl.arange(0, TILE)
        scaled = tl.div_rn(load_logits(logits_ptr, row, index, num_ids, row_stride), temperature)
        peak = tl.max(scaled, 0)
        shift = tl.where(peak == float("-inf"), 0.0, peak)
        tl.store(peaks_ptr + out, peak)
        weight = tl.exp(scaled - shift)
        tl.store(sums_ptr + out, tl.sum(weight.to(tl.float64), 0))
        part = out * (TILE // PART) + tl.arange(0, TILE // PART)
        tl.store(part_peaks_ptr + part, tl.max(tl.reshape(scaled, [TILE // PART, PART]), 1))
        tl.store(part_sums_ptr + part, tl.sum(tl.reshape(weight, [TILE // PART, PART]), 1))
        tl.store(scores_ptr + out, float("-inf"))
        tl.store(ids_ptr + out, NO_ID)
    else:
        position = tl.load(prefix_ptr + request) + row % width
        row_hash = hash_of_row(tl.load(seed_ptr + request), position)
        best, best_id = best_of_tile(
            logits_ptr, row, tile, temperature, row_hash, num_ids, row_stride, TILE
        )
        tl.store(peaks_ptr + out, float("-inf"))
        tl.store(scores_ptr + out, best)
        tl.store(ids_ptr + out, best_id)


@triton.jit
def mass_bound(part_peaks, part_sums, peak, wanted, PART: tl.constexpr):
    """A value that has more than `wanted` of the mass above it: no token below it is kept.

    Of a part at least its maximum is above a smaller value, and at least what is left of its sum
    when all other columns have that value.
    """
    heaviest = tl.exp(part_peaks - peak)
    low = peak - 40.0
    width = tl.full((), 40.0, tl.float32)
    found = float("-inf")
    for _halving in range(HALVINGS + 1):
        above = tl.where(part_peaks > low, heaviest, 0.0)
        above = tl.maximum(above, part_sums - (PART - 1) * tl.exp(low - peak))
        enough = tl.sum(above.to(tl.float64), 0) >= wanted
        found = tl.where(enough, low, found)
        width *= 0.5
        low = tl.where(enough, low, low - 2.0 * width) + width
    return found


@triton.jit
def kth_bound(part_peaks, given, top_k):
    """The k-th largest of the parts' maxima: k tokens are no smaller."""
    order = order_of(part_peaks)
    low, high = tl.full((), LOWEST, tl.int64), tl.full((), HIGHEST, tl.int64)
    for _halving in range(32):
        middle = (low + high + 1) >> 1
        enough = tl.sum((given & (order >= middle)).to(tl.int32), 0) >= top_k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    kth = tl.min(tl.where(given & (order >= low), part_peaks, float("inf")), 0)
    return tl.where(low == LOWEST, float("-inf"), kth)


@triton.jit(do_not_specialize=(*PARAMETERS, "width"))
def _bound_row(
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    peaks_ptr,
    sums_ptr,
    part_peaks_ptr,
    part_sums_ptr,
    row_peak_ptr,
    row_sum_ptr,
    bound_ptr,
    count_ptr,
    num_ids,
    tiles,
    width,
    TILES: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_A_TILE: tl.constexpr,
    PART: tl.constexpr,
):
    """A row's peak and normaliser, and a value that no kept token is below."""
    row = tl.program_id(0)
    _temperature, top_k, top_p, min_p, filtered = filters_of(
        row // width, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, num_ids
    )
    bound = tl.full((), float("inf"), tl.float32)
    if filtered:
        tile = tl.arange(0, TILES)
        peaks = tl.load(peaks_ptr + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
        sums = tl.load(sums_ptr + row * tiles + tile, mask=tile < tiles, other=0.0)
        peak = tl.max(peaks, 0)
        shift = tl.where(peak == float("-inf"), 0.0, peak)
        total = tl.sum(sums * tl.exp(peaks - shift), 0)
        tl.store(row_peak_ptr + row, shift)
        tl.store(row_sum_ptr + row, total)
        part = tl.arange(0, PARTS)
        given = part < tiles * PARTS_A_TILE
        at = row * tiles * PARTS_A_TILE + part
        part_peaks = tl.load(part_peaks_ptr + at, mask=given, other=float("-inf"))
        bound = tl.full((), float("-inf"), tl.float32)
        if min_p > 0:
            bound = tl.maximum(bound, shift + tl.log(min_p))
        if top_p < 1:
            part_sums = tl.load(part_sums_ptr + at, mask=given, other=0.0)
            tile_peaks = tl.load(
                peaks_ptr + row * tiles + part // PARTS_A_TILE, mask=given, other=float("-inf")
            )
            part_sums = tl.where(given, part_sums * tl.exp(tile_peaks - shift), 0.0)
            below = mass_bound(part_peaks, part_sums, shift, (top_p + 1e-5) * total, PART)
            bound = tl.maximum(bound, below)
        if top_k < num_ids:
            bound = tl.maximum(bound, kth_bound(part_peaks, given, top_k))
        bound -= 1e-5 * (tl.abs(bound) + 1.0)  # a bound may be low, never high: rounding
    tl.store(bound_ptr + row, bound)
    tl.store(count_ptr + row, 0)


@triton.jit(do_not_specialize=("temperature_ptr", "width"))
def _gather_tile(
    logits_ptr,
    temperature_ptr,
    peaks_ptr,
    bound_ptr,
    count_ptr,
    values_ptr,
    value_ids_ptr,
    num_ids,
    row_stride,
    width,
    TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Append a tile's tokens above the bound to the row's; a tile without any is not read."""
    row, tile = tl.program_id(0), tl.program_id(1)
    bound = tl.load(bound_ptr + row)
    peak = tl.load(peaks_ptr + row * tl.num_programs(1) + tile)
    if (peak >= bound) & (peak > float("-inf")):
        index = tile * TILE + tl.arange(0, TILE)
        x = load_logits(logits_ptr, row, index, num_ids, row_stride)
        scaled = tl.div_rn(x, tl.load(temperature_ptr + row // width))
        above = (scaled >= bound) & (x > float("-inf"))
        added = above.to(tl.int32)
        place = tl.atomic_add(count_ptr + row, tl.sum(added, 0)) + tl.cumsum(added, 0) - 1
        fits = above & (place < CAPACITY)
        out = row.to(tl.int64) * CAPACITY + place
        tl.store(values_ptr + out, scaled, mask=fits)
        tl.store(value_ids_ptr + out, index, mask=fits)


@triton.jit
def passes(number_above, mass_above, top_k, top_p, total):
    """Whether a token with so many, and so much, above it is kept by top-k and top-p."""
    return (number_above < top_k) & ((mass_above < top_p * total) | (top_p >= 1))


@triton.jit
def best_of(score, kept, ids, best, best_id):
    """The better of a tile's best kept token and the best so far; ties to the smaller id."""
    score = tl.where(kept, score, float("-inf"))
    top = tl.max(score, 0)
    top_id = tl.min(tl.where(kept & (score == top), ids, NO_ID), 0)
    best_id = tl.where(top > best, top_id, best_id)
    return tl.maximum(best, top), best_id


@triton.jit
def draw_from_gathered(
    values_ptr,
    value_ids_ptr,
    count,
    row_hash,
    peak,
    total,
    top_k,
    top_p,
    min_p,
    CAPACITY: tl.constexpr,
):
    """A row's token from those above its bound, among which are all kept ones."""
    place = tl.arange(0, CAPACITY)
    given = place < count
    scaled = tl.load(values_ptr + place, mask=given, other=float("-inf"))
    ids = tl.load(value_ids_ptr + place, mask=given, other=NO_ID)
    weight = tl.exp(scaled - peak)
    mass = tl.where(given, weight, 0.0).to(tl.float64)
    order = tl.where(given, order_of(scaled), LOWEST)
    # The smallest place in the order with few enough, and little enough, above it.
    low, high = tl.full((), LOWEST, tl.int64), tl.full((), HIGHEST, tl.int64)
    for _halving in range(32):
        middle = (low + high) >> 1
        above = order > middle
        number = tl.sum(above.to(tl.int32), 0)
        enough = passes(number, tl.sum(tl.where(above, mass, 0.0), 0), top_k, top_p, total)
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    kept = given & (order >= low) & (weight >= min_p)
    score = scaled.to(tl.float64) + gumbel64(hash_of(row_hash, ids))
    nothing = tl.full((), float("-inf"), tl.float64)
    _, best_id = best_of(score, kept, ids, nothing, 0)
    return best_id


@triton.jit
def draw_from_row(
    logits_ptr,
    row,
    temperature,
    row_hash,
    peak,
    total,
    top_k,
    top_p,
    min_p,
    num_ids,
    tiles,
    row_stride,
    TILE: tl.constexpr,
):
    """The same from the whole row, read once for every halving: for rows with many above."""
    low, high = tl.full((), LOWEST, tl.int64), tl.full((), HIGHEST, tl.int64)
    for _halving in range(32):
        middle = (low + high) >> 1
        number = tl.full((), 0, tl.int32)
        mass = tl.full((), 0.0, tl.float64)
        for tile in range(tiles):
            index = tile * TILE + tl.arange(0, TILE)
            x = load_logits(logits_ptr, row, index, num_ids, row_stride)
            scaled = tl.div_rn(x, temperature)
            above = (x > float("-inf")) & (order_of(scaled) > middle)
            number += tl.sum(above.to(tl.int32), 0)
            mass += tl.sum(tl.where(above, tl.exp(scaled - peak), 0.0).to(tl.float64), 0)
        enough = passes(number, mass, top_k, top_p, total)
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    best = tl.full((), float("-inf"), tl.float64)
    best_id = tl.full((), 0, tl.int32)
    for tile in range(tiles):
        index = tile * TILE + tl.arange(0, TILE)
        x = load_logits(logits_ptr, row, index, num_ids, row_stride)
        scaled = tl.div_rn(x, temperature)
        kept = (x > float("-inf")) & (order_of(scaled) >= low)
        kept = kept & (tl.exp(scaled - peak) >= min_p)
        score = scaled.to(tl.float64) + gumbel64(hash_of(row_hash, index))
        best, best_id = best_of(score, kept, index, best, best_id)
    return best_id


@triton.jit(do_not_specialize=("prefix_ptr", "seed_ptr", *PARAMETERS, "width"))
def _choose_row(
    logits_ptr,
    prefix_ptr,
    temperature_ptr,
    seed_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    row_peak_ptr,
    row_sum_ptr,
    count_ptr,
    values_ptr,
    value_ids_ptr,
    scores_ptr,
    ids_ptr,
    num_ids,
    tiles,
    row_stride,
    width,
    TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Draw a filtered row's token, and put it where `accept_request` finds the best of a tile."""
    row = tl.program_id(0)
    request = row // width
    temperature, top_k, top_p, min_p, filtered = filters_of(
        request, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, num_ids
    )
    if filtered:
        position = tl.load(prefix_ptr + request) + row % width
        row_hash = hash_of_row(tl.load(seed_ptr + request), position)
        peak, total = tl.load(row_peak_ptr + row), tl.load(row_sum_ptr + row)
        count = tl.load(count_ptr + row)
        gathered = row.to(tl.int64) * CAPACITY
        if count <= CAPACITY:
            best_id = draw_from_gathered(
                values_ptr + gathered,
                value_ids_ptr + gathered,
                count,
                row_hash,
                peak,
                total,
                top_k,
                top_p,
                min_p,
                CAPACITY,
            )
        else:
            best_id = draw_from_row(
                logits_ptr,
                row,
                temperature,
                row_hash,
                peak,
                total,
                top_k,
                top_p,
                min_p,
                num_ids,
                tiles,
                row_stride,
                TILE,
            )
        tl.store(scores_ptr + row * tiles, 0.0)  # above the other tiles' -inf
        tl.store(ids_ptr + row * tiles, best_id)


def accept_filtered(
    logits: Tensor,
    draft_ids: Tensor,
    prefix_lens: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    filters: Filters,
    *,
    limit: Tensor | None = None,
) -> Acceptance:
    """Launch of `dflash_kernels.accept_filtered.accept_filtered`."""
    (bs, width), num_ids, device = draft_ids.shape, logits.shape[1], logits.device
    logits, draft_ids, prefix_lens = rows_of(logits), rows_of(draft_ids), prefix_lens.contiguous()
    requests = (temperatures.contiguous(), *(values.contiguous() for values in filters))
    rows, tiles = bs * width, triton.cdiv(num_ids, TILE)
    if not bs:
        return Acceptance.empty(draft_ids, prefix_lens)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    scores, ids = new(rows, tiles, dtype=torch.float64), new(rows, tiles, dtype=torch.int32)
    peaks, sums = new(rows, tiles), new(rows, tiles, dtype=torch.float64)
    part_peaks, part_sums = new(rows, tiles, TILE // PART), new(rows, tiles, TILE // PART)
    row_peak, row_sum = new(rows), new(rows, dtype=torch.float64)
    bound, count = new(rows), new(rows, dtype=torch.int32)
    values, value_ids = new(rows, CAPACITY), new(rows, CAPACITY, dtype=torch.int32)
    seeds, temperature = seeds.contiguous(), requests[0]
    _scan_tile[(rows, tiles)](
        logits,
        prefix_lens,
        temperature,
        seeds,
        *requests[1:],
        scores,
        ids,
        peaks,
        sums,
        part_peaks,
        part_sums,
        num_ids,
        logits.stride(0),
        width,
        TILE=TILE,
        PART=PART,
        num_warps=4,
    )
    _bound_row[(rows,)](
        *requests,
        peaks,
        sums,
        part_peaks,
        part_sums,
        row_peak,
        row_sum,
        bound,
        count,
        num_ids,
        tiles,
        width,
        TILES=triton.next_power_of_2(tiles),
        PARTS=triton.next_power_of_2(tiles * (TILE // PART)),
        PARTS_A_TILE=TILE // PART,
        PART=PART,
        num_warps=4,
    )
    _gather_tile[(rows, tiles)](
        logits,
        temperature,
        peaks,
        bound,
        count,
        values,
        value_ids,
        num_ids,
        logits.stride(0),
        width,
        TILE=TILE,
        CAPACITY=CAPACITY,
        num_warps=8,
    )
    _choose_row[(rows,)](
        logits,
        prefix_lens,
        temperature,
        seeds,
        *requests[1:],
        row_peak,
        row_sum,
        count,
        values,
        value_ids,
        scores,
        ids,
        num_ids,
        tiles,
        logits.stride(0),
        width,
        TILE=TILE,
        CAPACITY=CAPACITY,
        num_warps=8,
    )
    return accept_best(scores, ids, draft_ids, prefix_lens, limit)


@launch_op("dflash::accept_filtered")
def accept_filtered_op(
    logits: Tensor,
    draft_ids: Tensor,
    prefix_lens: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    limit: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The launch as a custom op: opaque to a capture, and known to fake tensors."""
    filters = Filters(top_ks, top_ps, min_ps)
    return accept_filtered(
        logits, draft_ids, prefix_lens, temperatures, seeds, filters, limit=limit
    )


@accept_filtered_op.register_fake
def _(
    logits: Tensor,
    draft_ids: Tensor,
    prefix_lens: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    limit: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return Acceptance.empty(draft_ids, prefix_lens)
