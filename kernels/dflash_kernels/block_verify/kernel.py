"""Triton form of `block_verify` and `token_wise`.

One program a request accepts; one for each tile of the row after the accepted drafts sums its
weights; one a request draws. Probabilities are read as they are and computed with in float64.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_kernels.dispatch import launch_op
from dflash_kernels.triton_common import NO_ID, commit, lanes_of, rows_of
from dflash_kernels.types import Acceptance, Proposal

TILE = 2048  # columns a program reads: 64 bytes of float32 a thread in flight


@triton.jit
def running_ratios(steps, column, width):
    """r_0 .. r_{width-1} of p / q at each draft, [lanes] float64."""
    ratios = tl.full(steps.shape, 1.0, tl.float64)
    ratio = tl.full((), 1.0, tl.float64)
    for i in range(width - 1):
        ratio = tl.minimum(ratio * tl.sum(tl.where(column == i, steps, 0.0), 0), 1.0)
        ratios = tl.where(column == i + 1, ratio, ratios)
    return ratios


@triton.jit
def keep_probs(ratios, wanted, proposed, column, last):
    """h, by position: how likely a run ends there, unless it ends further on; [lanes] float64."""
    elsewhere = tl.maximum(1.0 - tl.sum(wanted, 1), 0.0)
    above = tl.sum(tl.maximum(ratios[:, None] * wanted - proposed, 0.0), 1)
    surplus = ratios * elsewhere + above
    lost = surplus + 1.0 - ratios
    # 0 / 0 where p equals q: nothing is lost by going on.
    inner = tl.where(lost > 0, surplus / tl.where(lost > 0, lost, 1.0), 1.0)
    return tl.where(column == last, ratios, inner)


@triton.jit(
    do_not_specialize=(
        "draft_ptr",
        "uniforms_ptr",
        "limit_ptr",
        "draft_stride",
        "top_stride",
        "uniforms_stride",
        "width",
    )
)
def _accept_drafts(
    draft_ptr,
    top_ids_ptr,
    top_probs_ptr,
    verifier_ptr,
    uniforms_ptr,
    limit_ptr,
    accept_ptr,
    ratio_ptr,
    following_ptr,
    draft_stride,
    top_stride,
    verifier_stride,
    row_stride,
    uniforms_stride,
    width,
    TOP: tl.constexpr,
    LANES: tl.constexpr,
    TOP_LANES: tl.constexpr,
    AS_BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    column, rank = tl.arange(0, LANES), tl.arange(0, TOP_LANES)
    has_draft = column < width - 1
    draft = tl.load(draft_ptr + request * draft_stride + column + 1, mask=has_draft, other=0)
    given = has_draft[:, None] & (rank[None, :] < TOP)
    top = request * top_stride + column[:, None] * TOP + rank[None, :]
    ids = tl.load(top_ids_ptr + top, mask=given, other=-1)
    proposed = tl.load(top_probs_ptr + top, mask=given, other=0.0).to(tl.float64)
    # int64: a request times its rows passes 2**31 with 541 requests of 16 rows of 248k ids.
    rows = verifier_ptr + request.to(tl.int64) * verifier_stride + column.to(tl.int64) * row_stride
    drawn_from = tl.sum(tl.where(ids == draft[:, None], proposed, 0.0), 1)
    likely = tl.load(rows + draft, mask=has_draft, other=0.0).to(tl.float64)

    last = width - 1
    if limit_ptr is not None:
        last = tl.minimum(tl.load(limit_ptr + request), last)
    uniforms = uniforms_ptr + request * uniforms_stride
    if AS_BLOCK:
        wanted = tl.load(rows[:, None] + ids, mask=given, other=0.0).to(tl.float64)
        ratios = running_ratios(likely / tl.where(has_draft, drawn_from, 1.0), column, width)
        keep = keep_probs(ratios, wanted, proposed, column, last)
        reachable = (column >= 1) & (column <= last)
        u = tl.load(uniforms + column - 1, mask=reachable, other=0.0).to(tl.float64)
        accept_len = tl.max(tl.where(reachable & (u < keep), column, 0), 0)
        ratio = tl.sum(tl.where(column == accept_len, ratios, 0.0), 0)
    else:
        u = tl.load(uniforms + column, mask=has_draft, other=0.0).to(tl.float64)
        accepted = (u * drawn_from < likely) & (column < last)
        accept_len = tl.min(tl.where(accepted, width, column), 0)
        ratio = tl.full((), 1.0, tl.float64)
    # The row's proposal is subtracted, but for a request that accepted all it may.
    whole = accept_len == last
    tl.store(accept_ptr + request, accept_len)
    tl.store(ratio_ptr + request, tl.where(whole, 1.0, ratio))
    tl.store(following_ptr + request, tl.where(whole, -1, accept_len))


@triton.jit
def weights_of_tile(
    tile,
    row_ptr,
    ids_ptr,
    probs_ptr,
    ratio,
    subtract,
    num_ids,
    TOP: tl.constexpr,
    TILE: tl.constexpr,
):
    """The bonus' weights at a tile of its row: ids, p, and what is left of ratio * p; [TILE]."""
    index = tile * TILE + tl.arange(0, TILE)
    p = tl.load(row_ptr + index, mask=index < num_ids, other=0.0).to(tl.float64)
    weight = p * ratio
    if subtract:
        for rank in range(TOP):
            proposed = tl.load(ids_ptr + rank)
            if proposed // TILE == tile:
                probability = tl.load(probs_ptr + rank).to(tl.float64)
                weight = tl.where(index == proposed, weight - probability, weight)
        weight = tl.maximum(weight, 0.0)
    return index, p, weight


@triton.jit(do_not_specialize=("top_stride",))
def _sum_tile(
    top_ids_ptr,
    top_probs_ptr,
    verifier_ptr,
    accept_ptr,
    ratio_ptr,
    following_ptr,
    sums_ptr,
    num_ids,
    top_stride,
    verifier_stride,
    row_stride,
    TOP: tl.constexpr,
    TILE: tl.constexpr,
):
    request, tile = tl.program_id(0), tl.program_id(1)
    row = tl.load(accept_ptr + request).to(tl.int64) * row_stride
    row_ptr = verifier_ptr + request.to(tl.int64) * verifier_stride + row
    following = tl.load(following_ptr + request)
    top = request * top_stride + following * TOP
    ratio = tl.load(ratio_ptr + request)
    _, p, weight = weights_of_tile(
        tile,
        row_ptr,
        top_ids_ptr + top,
        top_probs_ptr + top,
        ratio,
        following >= 0,
        num_ids,
        TOP,
        TILE,
    )
    out = sums_ptr + (request * tl.num_programs(1) + tile) * 2
    tl.store(out, tl.sum(weight, 0))
    tl.store(out + 1, tl.sum(p, 0))


@triton.jit(
    do_not_specialize=(
        "draft_ptr",
        "uniforms_ptr",
        "prefix_ptr",
        "draft_stride",
        "top_stride",
        "uniforms_stride",
        "width",
    )
)
def _draw_bonus(
    draft_ptr,
    top_ids_ptr,
    top_probs_ptr,
    verifier_ptr,
    uniforms_ptr,
    prefix_ptr,
    ratio_ptr,
    following_ptr,
    sums_ptr,
    accept_ptr,
    commit_ptr,
    bonus_ptr,
    lens_ptr,
    output_ptr,
    num_ids,
    tiles,
    draft_stride,
    top_stride,
    verifier_stride,
    row_stride,
    uniforms_stride,
    width,
    TOP: tl.constexpr,
    LANES: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    request = tl.program_id(0)
    accept_len = tl.load(accept_ptr + request)
    following = tl.load(following_ptr + request)
    ratio = tl.load(ratio_ptr + request)
    tile = tl.arange(0, TILES)
    pairs = sums_ptr + (request * tiles + tile) * 2
    sums = tl.load(pairs, mask=tile < tiles, other=0.0)
    if tl.sum(sums, 0) <= 0:
        # A residual without mass was rejected by rounding alone: the whole distribution.
        sums = tl.load(pairs + 1, mask=tile < tiles, other=0.0)
        following = following * 0 - 1
        ratio = ratio * 0 + 1.0
    u = tl.load(uniforms_ptr + request * uniforms_stride + width - 1).to(tl.float64)
    threshold = u * tl.sum(sums, 0)
    # Sums of a scan need not ascend in the last bit: what has no weight is left out by name, and
    # where rounding leaves nothing above the threshold the last that has some is taken.
    over = (tl.cumsum(sums, 0) > threshold) & (sums > 0)
    chosen = tl.min(tl.where(over, tile, NO_ID), 0)
    chosen = tl.minimum(chosen, tl.max(tl.where(sums > 0, tile, 0), 0))
    threshold -= tl.sum(tl.where(tile < chosen, sums, 0.0), 0)

    row = accept_len.to(tl.int64) * row_stride
    top = request * top_stride + following * TOP
    index, _, weight = weights_of_tile(
        chosen,
        verifier_ptr + request.to(tl.int64) * verifier_stride + row,
        top_ids_ptr + top,
        top_probs_ptr + top,
        ratio,
        following >= 0,
        num_ids,
        TOP,
        TILE,
    )
    over = (tl.cumsum(weight, 0) > threshold) & (weight > 0)
    bonus = tl.min(tl.where(over, index, NO_ID), 0)
    bonus = tl.minimum(bonus, tl.max(tl.where(weight > 0, index, 0), 0)).to(tl.int64)

    column = tl.arange(0, LANES)
    draft = tl.load(
        draft_ptr + request * draft_stride + column + 1, mask=column < width - 1, other=0
    )
    commit(
        request,
        column,
        column < accept_len,
        draft,
        bonus,
        prefix_ptr,
        accept_ptr,
        commit_ptr,
        bonus_ptr,
        lens_ptr,
        output_ptr,
        width,
        True,
    )


def block_verify(
    draft_ids: Tensor,
    proposal: Proposal,
    verifier_probs: Tensor,
    uniforms: Tensor,
    prefix_lens: Tensor,
    *,
    limit: Tensor | None = None,
) -> Acceptance:
    """Launch of `dflash_kernels.block_verify.block_verify`."""
    return _launch(draft_ids, proposal, verifier_probs, uniforms, prefix_lens, limit, True)


def token_wise(
    draft_ids: Tensor,
    proposal: Proposal,
    verifier_probs: Tensor,
    uniforms: Tensor,
    prefix_lens: Tensor,
    *,
    limit: Tensor | None = None,
) -> Acceptance:
    """Launch of `dflash_kernels.block_verify.token_wise`."""
    return _launch(draft_ids, proposal, verifier_probs, uniforms, prefix_lens, limit, False)


def _launch(
    draft_ids: Tensor,
    proposal: Proposal,
    verifier_probs: Tensor,
    uniforms: Tensor,
    prefix_lens: Tensor,
    limit: Tensor | None,
    as_block: bool,
) -> Acceptance:
    (bs, width), num_ids = draft_ids.shape, verifier_probs.shape[2]
    draft_ids, uniforms = rows_of(draft_ids), rows_of(uniforms)
    top_ids, top_probs = (columns.contiguous() for columns in proposal)
    if verifier_probs.stride(2) != 1:
        verifier_probs = verifier_probs.contiguous()
    device, top = verifier_probs.device, top_ids.shape[2]
    tiles = triton.cdiv(num_ids, TILE)
    got = Acceptance.empty(draft_ids, prefix_lens)
    ratio = torch.empty(bs, dtype=torch.float64, device=device)
    following = torch.empty(bs, dtype=torch.int32, device=device)
    # The tile's share of what is left of the distribution, and of the distribution.
    sums = torch.empty((bs, tiles, 2), dtype=torch.float64, device=device)
    top_stride = (width - 1) * top
    strides = (top_stride, verifier_probs.stride(0), verifier_probs.stride(1))
    lanes = lanes_of(width)
    if bs:
        _accept_drafts[(bs,)](
            draft_ids,
            top_ids,
            top_probs,
            verifier_probs,
            uniforms,
            None if limit is None else limit.contiguous(),
            got.accept_len,
            ratio,
            following,
            draft_ids.stride(0),
            *strides,
            uniforms.stride(0),
            width,
            TOP=top,
            LANES=lanes,
            TOP_LANES=triton.next_power_of_2(top),
            AS_BLOCK=as_block,
            num_warps=4,
        )
        _sum_tile[(bs, tiles)](
            top_ids,
            top_probs,
            verifier_probs,
            got.accept_len,
            ratio,
            following,
            sums,
            num_ids,
            *strides,
            TOP=top,
            TILE=TILE,
            num_warps=4,
        )
        _draw_bonus[(bs,)](
            draft_ids,
            top_ids,
            top_probs,
            verifier_probs,
            uniforms,
            prefix_lens.contiguous(),
            ratio,
            following,
            sums,
            got.accept_len,
            got.commit_len,
            got.bonus_ids,
            got.new_seq_lens,
            got.output_ids,
            num_ids,
            tiles,
            draft_ids.stride(0),
            *strides,
            uniforms.stride(0),
            width,
            TOP=top,
            LANES=lanes,
            TILES=triton.next_power_of_2(tiles),
            TILE=TILE,
            num_warps=4,
        )
    return got


@launch_op("dflash::block_verify")
def block_verify_op(
    draft_ids: Tensor,
    top_ids: Tensor,
    top_probs: Tensor,
    verifier_probs: Tensor,
    uniforms: Tensor,
    prefix_lens: Tensor,
    limit: Tensor | None,
    as_block: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The launch as a custom op: opaque to a capture, and known to fake tensors."""
    rule = block_verify if as_block else token_wise
    proposal = Proposal(top_ids, top_probs)
    return rule(draft_ids, proposal, verifier_probs, uniforms, prefix_lens, limit=limit)


@block_verify_op.register_fake
def _(
    draft_ids: Tensor,
    top_ids: Tensor,
    top_probs: Tensor,
    verifier_probs: Tensor,
    uniforms: Tensor,
    prefix_lens: Tensor,
    limit: Tensor | None,
    as_block: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return Acceptance.empty(draft_ids, prefix_lens)
