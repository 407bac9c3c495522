"""Triton form of `verify_bound`: one program."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_kernels.dispatch import launch_op
from dflash_kernels.verify_bound.reference import EDGES


@triton.jit(
    do_not_specialize=(
        "values_ptr",
        "lse_ptr",
        "acceptance_ptr",
        "prices_ptr",
        "drafts",
        "value_stride",
        "lse_stride",
    )
)
def _verify_bound(
    values_ptr,
    lse_ptr,
    acceptance_ptr,
    prices_ptr,
    out_ptr,
    drafts,
    value_stride,
    lse_stride,
    EDGES: tl.constexpr,
    LANES: tl.constexpr,
):
    lane = tl.arange(0, LANES)
    drafted = lane < drafts
    value = tl.load(values_ptr + lane * value_stride, mask=drafted, other=0.0)
    lse = tl.load(lse_ptr + lane * lse_stride, mask=drafted, other=0.0)
    confidence = tl.exp(value - lse)
    chosen = tl.zeros([LANES], tl.int32)
    for i in tl.static_range(len(EDGES)):
        chosen += (confidence >= EDGES[i]).to(tl.int32)
    accepted = tl.load(acceptance_ptr + chosen, mask=drafted, other=0.0)
    expected = tl.cumsum(tl.cumprod(accepted, 0), 0)
    price = tl.load(prices_ptr + 1 + lane, mask=drafted, other=float("inf"))
    worth = expected - price
    best = tl.maximum(tl.max(worth, 0), -tl.load(prices_ptr))
    # The last of equals.
    count = tl.max(tl.where(drafted & (worth == best), lane + 1, 0), 0)
    tl.store(out_ptr, count + 1)
    tl.store(out_ptr + 1, count)
    tl.store(out_ptr + 2 + lane, chosen, mask=drafted)


def verify_bound(values: Tensor, lse: Tensor, acceptance: Tensor, prices: Tensor) -> Tensor:
    """Launch of `dflash_kernels.verify_bound.verify_bound`."""
    drafts = values.numel()
    out = torch.empty(drafts + 2, dtype=torch.int32, device=values.device)
    _verify_bound[(1,)](
        values,
        lse,
        acceptance.contiguous(),
        prices.contiguous(),
        out,
        drafts,
        values.stride(0),
        lse.stride(0),
        EDGES=EDGES,
        # Blocks of up to 33 tokens, nearly all, share one compiled kernel.
        LANES=max(32, triton.next_power_of_2(drafts)),
        num_warps=1,
    )
    return out


@launch_op("dflash::verify_bound")
def verify_bound_op(values: Tensor, lse: Tensor, acceptance: Tensor, prices: Tensor) -> Tensor:
    """The launch as a custom op: opaque to a capture, and known to fake tensors."""
    return verify_bound(values, lse, acceptance, prices)


@verify_bound_op.register_fake
def _(values: Tensor, lse: Tensor, acceptance: Tensor, prices: Tensor) -> Tensor:
    return values.new_empty(values.shape[0] + 2, dtype=torch.int32)
