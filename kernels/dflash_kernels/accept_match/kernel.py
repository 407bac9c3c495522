"""Triton form of `accept_match`: one program a request."""

import triton
import triton.language as tl
from torch import Tensor

from dflash_kernels.dispatch import launch_op
from dflash_kernels.triton_common import commit, lanes_of, rows_of
from dflash_kernels.types import Acceptance


@triton.jit(
    do_not_specialize=(
        "draft_ptr",
        "verifier_ptr",
        "prefix_ptr",
        "limit_ptr",
        "extra_accept_ptr",
        "draft_stride",
        "verifier_stride",
        "extra_accept_stride",
        "width",
    )
)
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
    width,
    LANES: tl.constexpr,
):
    request = tl.program_id(0)
    column = tl.arange(0, LANES)
    has_draft = column < width - 1
    draft = tl.load(draft_ptr + request * draft_stride + column + 1, mask=has_draft, other=0)
    chosen = tl.load(
        verifier_ptr + request * verifier_stride + column, mask=column < width, other=0
    )
    accepted = draft == chosen
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
        chosen,
        prefix_ptr,
        accept_ptr,
        commit_ptr,
        bonus_ptr,
        lens_ptr,
        output_ptr,
        width,
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
            width,
            LANES=lanes_of(width),
            num_warps=1,
        )
    return got


@launch_op("dflash::accept_match")
def accept_match_op(
    draft_ids: Tensor,
    verifier_ids: Tensor,
    prefix_lens: Tensor,
    limit: Tensor | None,
    extra_accept: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The launch as a custom op: opaque to a capture, and known to fake tensors."""
    got = accept_match(draft_ids, verifier_ids, prefix_lens, limit=limit, extra_accept=extra_accept)
    # An op's output may not be its input.
    return got if extra_accept is not None else got._replace(output_ids=verifier_ids.new_empty(0))


@accept_match_op.register_fake
def _(
    draft_ids: Tensor,
    verifier_ids: Tensor,
    prefix_lens: Tensor,
    limit: Tensor | None,
    extra_accept: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    no_output = verifier_ids.new_empty(0) if extra_accept is None else None
    return Acceptance.empty(draft_ids, prefix_lens, no_output)
