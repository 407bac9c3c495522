"""Triton form of `accept_match`: one program a request."""

import triton
import triton.language as tl
from torch import Tensor

from dflash_kernels.types import Acceptance


@triton.jit
def commit(
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
    WIDTH: tl.constexpr,
    WRITE_OUTPUT: tl.constexpr,
):
    """Store one request's acceptance.

    All tiles are [lanes]. `accepted` says which drafts may be accepted, each taken alone; it is
    false from column WIDTH - 1 on, where there is none.
    """
    accept_len = tl.min(tl.where(accepted, WIDTH, column), 0)  # the first that is not
    bonus = tl.sum(tl.where(column == accept_len, target, 0), 0)
    tl.store(accept_ptr + request, accept_len)
    tl.store(commit_ptr + request, accept_len + 1)
    tl.store(bonus_ptr + request, bonus)
    tl.store(lens_ptr + request, tl.load(prefix_ptr + request) + accept_len + 1)
    if WRITE_OUTPUT:
        output = tl.where(column < accept_len, draft, target)
        tl.store(output_ptr + request * WIDTH + column, output, mask=column < WIDTH)


@triton.jit
def _accept_match(
    draft_ptr,
    verifier_ptr,
    prefix_ptr,
    limit_ptr,
    extra_accept_ptr,
    accept_ptr,
    commit_ptr,
    bonus_ptr,
    lens_ptr,
    output_ptr,
    draft_stride,
    verifier_stride,
    extra_accept_stride,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
):
    request = tl.program_id(0)
    column = tl.arange(0, LANES)
    has_draft = column < WIDTH - 1
    draft = tl.load(draft_ptr + request * draft_stride + column + 1, mask=has_draft, other=0)
    target = tl.load(
        verifier_ptr + request * verifier_stride + column, mask=column < WIDTH, other=0
    )
    accepted = draft == target
    if extra_accept_ptr is not None:
        extra_accept = tl.load(
            extra_accept_ptr + request * extra_accept_stride + column, mask=has_draft, other=0
        )
        accepted = accepted | (extra_accept != 0)
    accepted = accepted & has_draft
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
        output_ptr is not None,
    )


def accept_match(
    draft_ids: Tensor,
    verifier_ids: Tensor,
    prefix_lens: Tensor,
    *,
    limit: Tensor | None = None,
    extra_accept: Tensor | None = None,
) -> Acceptance:
    """Launch of `dflash_kernels.accept_match.accept_match`."""
    bs, width = draft_ids.shape
    draft_ids, verifier_ids = rows_of(draft_ids), rows_of(verifier_ids)
    extra_accept = None if extra_accept is None else rows_of(extra_accept)
    got = Acceptance.empty(draft_ids, prefix_lens, verifier_ids if extra_accept is None else None)
    if bs:
        _accept_match[(bs,)](
            draft_ids,
            verifier_ids,
            prefix_lens.contiguous(),
            None if limit is None else limit.contiguous(),
            extra_accept,
            got.accept_len,
            got.commit_len,
            got.bonus_ids,
            got.new_seq_lens,
            None if extra_accept is None else got.output_ids,
            draft_ids.stride(0),
            verifier_ids.stride(0),
            0 if extra_accept is None else extra_accept.stride(0),
            WIDTH=width,
            LANES=triton.next_power_of_2(width),
            num_warps=1,
        )
    return got


def rows_of(matrix: Tensor) -> Tensor:
    """`matrix` with adjacent columns; rows may lie apart, as in a slice of columns."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()
