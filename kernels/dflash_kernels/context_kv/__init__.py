"""Normalise, rotate and write the drafter's context keys and values, all layers at once."""

from torch import Tensor

from dflash_kernels.context_kv import reference
from dflash_kernels.dispatch import check_shape, runs_triton
from dflash_kernels.types import LayerCaches

__all__ = ["context_kv"]


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
    r"""Write keys and values of every drafter layer for tokens whose projections are known.

    For each token t, layer l and head, with k and v its rows of `kv`:

        n = k / sqrt(mean(k^2) + eps) * norm_weights[l]
        n_1, n_2, n_3 = the first and second half of the rotary dimensions, and the rest
        key = (n_1 cos - n_2 sin,  n_2 cos + n_1 sin,  n_3)      cos, sin at positions[t]

        keys[l][slots[t]] = key / k_scale[l],    values[l][slots[t]] = v / v_scale[l]

    computed in float32 and rounded once, to the cache's dtype; FP8 saturates at its largest finite
    value. One launch for all layers and tokens.

    Args:
        kv: [tokens, layers, 2, heads, head_dim], keys first; tokens may lie apart, the rest is
            contiguous: one product of the context with the stacked projections.
        norm_weights: [layers, head_dim], contiguous; for a norm that scales by 1 + w, 1 + w.
        cos_sin: [max_position, rotary_dim], cosines of the first half, then sines; adjacent
            columns. Halves rotate against each other ("neox"), adjacent pairs do not.
        positions: [tokens] int64, rows of `cos_sin`.
        slots: [tokens] int64, rows of the caches, of any page size; a negative one is not written.
            No two tokens that are written share a slot.
        caches: buffers of every layer.
        eps: of the norm.
        valid_lens: [bs] int32; tokens are then bs blocks of equal width, and of block r only the
            first valid_lens[r] are written. None: all are.

    Raises:
        ValueError: shapes do not fit each other, or a tensor is not contiguous where it has to be.
    """
    _check(kv, norm_weights, cos_sin, positions, slots, caches, valid_lens)
    if not runs_triton(kv):
        reference.context_kv(
            kv, norm_weights, cos_sin, positions, slots, caches, eps=eps, valid_lens=valid_lens
        )
        return
    from dflash_kernels.context_kv import kernel

    kernel.context_kv_op(kv, norm_weights, cos_sin, positions, slots, *caches, eps, valid_lens)


def _check(
    kv: Tensor,
    norm_weights: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    caches: LayerCaches,
    valid_lens: Tensor | None,
) -> None:
    layers, (_, heads, head_dim) = len(caches.keys), caches.keys[0].shape
    check_shape("kv", kv, slots.shape[0], layers, 2, heads, head_dim)
    check_shape("positions", positions, *slots.shape)
    check_shape("norm_weights", norm_weights, layers, head_dim)
    packed = (2 * heads * head_dim, heads * head_dim, head_dim, 1)
    in_token = all(
        size == 1 or stride == expected_stride
        for size, stride, expected_stride in zip(kv.shape[1:], kv.stride()[1:], packed, strict=True)
    )
    if not (in_token and norm_weights.is_contiguous() and cos_sin.stride(1) == 1):
        raise ValueError(
            "expected contiguous tokens, norm_weights and rows of cos_sin, got strides"
            f" {kv.stride()}, {norm_weights.stride()}, {cos_sin.stride()}"
        )
    rotary_dim = cos_sin.shape[1]
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ValueError(f"expected an even rotary_dim in 2..{head_dim}, got {rotary_dim}")
    if valid_lens is not None and slots.shape[0] % valid_lens.shape[0]:
        raise ValueError(
            f"expected blocks of equal width, got {slots.shape[0]} tokens"
            f" and {valid_lens.shape[0]} valid_lens"
        )
