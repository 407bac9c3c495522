"""Triton form of `context_kv`: one program for a token and a layer."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_kernels.dispatch import launch_op
from dflash_kernels.types import FP8, LayerCaches


@triton.jit
def _e4m3_bits(x):
    """The float8_e4m3fn nearest to float32 `x`, ties to even, saturated, as uint8.

    In integers rather than by a conversion instruction: sm_80 has none, and the interpreter's loses
    the carry from the mantissa (1.97 becomes 1).
    """
    size = tl.minimum(tl.abs(x), 448.0)
    # Three mantissa bits of 23 stay; the exponent's bias goes from 127 to 7.
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below 2**-6 codes are multiples of 2**-9, the last bit of a float32 at 2**14.
    subnormal = (size + 16384.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(size < 0.015625, subnormal, normal)
    code = tl.where(x == x, code, 0x7F)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)


@triton.jit
def _store(row_ptr, x, scale_ptr, mask, FP8: tl.constexpr):
    """Write float32 values to a cache row, in the cache's dtype."""
    if scale_ptr is not None:
        x = x / tl.load(scale_ptr)
    if FP8:
        tl.store(row_ptr, _e4m3_bits(x), mask=mask)
    else:
        tl.store(row_ptr, x.to(row_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=("positions_ptr", "slots_ptr", "valid_ptr", "width"))
def _context_kv(
    kv_ptr,
    weight_ptr,
    cos_sin_ptr,
    positions_ptr,
    slots_ptr,
    valid_ptr,
    cache_ptr,
    offsets_ptr,
    scales_ptr,
    eps,
    width,
    kv_stride,
    cos_sin_stride,
    slot_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEAD_LANES: tl.constexpr,
    HALF_LANES: tl.constexpr,
    REST_LANES: tl.constexpr,
    VALUE_LANES: tl.constexpr,
    FP8: tl.constexpr,
):
    token, layer = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if valid_ptr is not None:
        slot = tl.where(token % width < tl.load(valid_ptr + token // width), slot, -1)
    if slot < 0:
        return

    # int64: a prefill chunk of 64k tokens with 5 layers of 8 x 128 passes 2**29 elements.
    keys_ptr = kv_ptr + token.to(tl.int64) * kv_stride + layer * (2 * HEADS * HEAD_DIM)
    values_ptr = keys_ptr + HEADS * HEAD_DIM
    # `LayerCaches.of` checked it: without the hint a store would be one element wide.
    key_offset = tl.multiple_of(tl.load(offsets_ptr + 2 * layer), 16)
    value_offset = tl.multiple_of(tl.load(offsets_ptr + 2 * layer + 1), 16)
    key_row = cache_ptr + key_offset + slot * slot_stride
    value_row = cache_ptr + value_offset + slot * slot_stride
    key_scale = scales_ptr
    value_scale = scales_ptr
    if scales_ptr is not None:
        key_scale = scales_ptr + 2 * layer
        value_scale = scales_ptr + 2 * layer + 1

    head = tl.arange(0, HEAD_LANES)[:, None]
    dim = tl.arange(0, HALF_LANES)[None, :]
    pair = (head < HEADS) & (dim < HALF)
    at = head * HEAD_DIM + dim
    first = tl.load(keys_ptr + at, mask=pair, other=0.0).to(tl.float32)
    second = tl.load(keys_ptr + at + HALF, mask=pair, other=0.0).to(tl.float32)
    square = tl.sum(first * first + second * second, 1)
    if REST_LANES:
        rest_dim = 2 * HALF + tl.arange(0, REST_LANES)[None, :]
        in_rest = (head < HEADS) & (rest_dim < HEAD_DIM)
        rest_at = head * HEAD_DIM + rest_dim
        rest = tl.load(keys_ptr + rest_at, mask=in_rest, other=0.0).to(tl.float32)
        square += tl.sum(rest * rest, 1)
    scale = tl.rsqrt(square / HEAD_DIM + eps)[:, None]

    weights = weight_ptr + layer * HEAD_DIM
    first *= scale * tl.load(weights + dim, mask=dim < HALF, other=0.0).to(tl.float32)
    second *= scale * tl.load(weights + HALF + dim, mask=dim < HALF, other=0.0).to(tl.float32)
    angle = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * cos_sin_stride + dim
    cos = tl.load(angle, mask=dim < HALF, other=0.0).to(tl.float32)
    sin = tl.load(angle + HALF, mask=dim < HALF, other=0.0).to(tl.float32)
    _store(key_row + at, first * cos - second * sin, key_scale, pair, FP8)
    _store(key_row + at + HALF, second * cos + first * sin, key_scale, pair, FP8)
    if REST_LANES:
        weight = tl.load(weights + rest_dim, mask=rest_dim < HEAD_DIM, other=0.0).to(tl.float32)
        _store(key_row + rest_at, rest * scale * weight, key_scale, in_rest, FP8)

    element = tl.arange(0, VALUE_LANES)
    in_row = element < HEADS * HEAD_DIM
    value = tl.load(values_ptr + element, mask=in_row, other=0.0).to(tl.float32)
    _store(value_row + element, value, value_scale, in_row, FP8)


def context_kv(
    kv: Tensor,
    norm_weights: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    caches: LayerCaches,
    *,
    eps: float,
    valid_lens: Tensor | None = None,
) -> None:
    """Launch of `dflash_kernels.context_kv.context_kv`."""
    tokens, layers, _, heads, head_dim = kv.shape
    rotary_dim = cos_sin.shape[1]
    rest = head_dim - rotary_dim
    if not tokens:
        return
    cache, is_fp8 = caches.keys[0], caches.keys[0].dtype == FP8
    _context_kv[(tokens, layers)](
        kv,
        norm_weights,
        cos_sin,
        positions.contiguous(),
        slots.contiguous(),
        None if valid_lens is None else valid_lens.contiguous(),
        cache.view(torch.uint8) if is_fp8 else cache,
        caches.offsets,
        caches.scales,
        eps,
        tokens if valid_lens is None else tokens // valid_lens.shape[0],
        kv.stride(0),
        cos_sin.stride(0),
        cache.stride(0),
        HEADS=heads,
        HEAD_DIM=head_dim,
        HALF=rotary_dim // 2,
        HEAD_LANES=triton.next_power_of_2(heads),
        HALF_LANES=triton.next_power_of_2(rotary_dim // 2),
        REST_LANES=triton.next_power_of_2(rest) if rest else 0,
        VALUE_LANES=triton.next_power_of_2(heads * head_dim),
        FP8=is_fp8,
        # Eight elements a thread in each half: 16 bytes of bfloat16.
        num_warps=max(1, triton.next_power_of_2(heads * rotary_dim // 2) // 256),
    )


@launch_op("dflash::context_kv", mutates_args=("keys", "values"))
def context_kv_op(
    kv: Tensor,
    norm_weights: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    offsets: Tensor,
    scales: Tensor | None,
    eps: float,
    valid_lens: Tensor | None,
) -> None:
    """The launch as a custom op: opaque to a capture, and known to fake tensors."""
    caches = LayerCaches(keys, values, offsets, scales)
    context_kv(kv, norm_weights, cos_sin, positions, slots, caches, eps=eps, valid_lens=valid_lens)


@context_kv_op.register_fake
def _(
    kv: Tensor,
    norm_weights: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    offsets: Tensor,
    scales: Tensor | None,
    eps: float,
    valid_lens: Tensor | None,
) -> None:
    return None
