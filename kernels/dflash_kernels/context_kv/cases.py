"""Cases of `context_kv`: head and rotary sizes, cache dtypes, tokens that are not written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_kernels.case import BF16, FP16, FP32, Case, Inputs, Trial, name_of, untouched
from dflash_kernels.types import FP8, LayerCaches, ServerShapes

EPS = 1e-6
# One step of the cache's numbers, where a GPU's approximate square root and division, or another
# order of a sum, let rounding fall to the other side.
STEP = {FP32: 1e-5, FP16: 2e-3, BF16: 1.6e-2, FP8: 0.13}


class Given(NamedTuple):
    """Arguments of `context_kv`, with the shape of the caches in place of the caches."""

    kv: Tensor
    norm_weights: Tensor
    cos_sin: Tensor
    positions: Tensor
    slots: Tensor
    pool: int  # slots of a cache
    dtype: torch.dtype  # of the caches
    scales: Tensor | None = None
    valid_lens: Tensor | None = None

    def write(self, op: ModuleType) -> LayerCaches:
        """Write to new caches that hold a 7 wherever nothing is written."""
        layers, _, heads, head_dim = self.kv.shape[1:]
        shape = (2 * layers, self.pool, heads, head_dim)
        filled = torch.full(shape, 7.0, device=self.kv.device).to(self.dtype)
        caches = LayerCaches.of(list(filled[:layers]), list(filled[layers:]), self.scales)
        op.context_kv(*self[:5], caches, eps=EPS, valid_lens=self.valid_lens)
        return caches


def projections(
    new: Inputs,
    tokens: int = 7,
    layers: int = 3,
    heads: int = 2,
    head_dim: int = 64,
    rotary_dim: int = 64,
    dtype: torch.dtype = FP32,
    cache_dtype: torch.dtype = FP32,
    scales: Tensor | None = None,
) -> Given:
    """Random projections of some tokens, in shuffled slots of a larger pool."""
    angles = 6 * new.uniforms(100, rotary_dim // 2)
    pool = max(40, 2 * tokens)
    return Given(
        kv=new.floats(tokens, layers, 2, heads, head_dim, dtype=dtype),
        norm_weights=1 + 0.2 * new.floats(layers, head_dim),
        cos_sin=torch.cat([angles.cos(), angles.sin()], dim=1),
        positions=new.ids(100, tokens),
        slots=new.permutation(pool)[:tokens],
        pool=pool,
        dtype=cache_dtype,
        scales=scales,
    )


def trial(given: Given) -> Trial:
    """Keys of all layers, then values: every slot, written or not."""

    def run(op: ModuleType) -> Sequence[Tensor]:
        caches = given.write(op)
        return [*caches.keys, *caches.values]

    return Trial(run)


def of_size(
    tokens: int = 7,
    layers: int = 3,
    heads: int = 2,
    head_dim: int = 64,
    rotary_dim: int = 64,
    cache_dtype: torch.dtype = FP32,
) -> Case:
    """Numbers of tokens, layers, heads and dimensions."""
    shape = (tokens, layers, heads, head_dim, rotary_dim)
    dtype = FP32 if cache_dtype == FP32 else BF16
    return Case(
        f"{tokens} tokens, {layers} layers of {heads} x {head_dim}, rotary {rotary_dim},"
        f" {name_of(cache_dtype)} cache",
        lambda new: trial(projections(new, *shape, dtype=dtype, cache_dtype=cache_dtype)),
        STEP[cache_dtype],
    )


def low_precision_tables(new: Inputs) -> Trial:
    """Norm weights and rotary tables are bfloat16 as well."""
    given = projections(new, dtype=BF16, cache_dtype=BF16)
    weights, cos_sin = given.norm_weights.to(BF16), given.cos_sin.to(BF16)
    return trial(given._replace(norm_weights=weights, cos_sin=cos_sin))


def fp8_scaled(new: Inputs) -> Trial:
    """Scales of every layer; the value scale of the first drives it past FP8's range."""
    scales = new.each(0.5, 0.004, 0.01, 2.0, 1.0, 1.0).view(3, 2)
    return trial(projections(new, dtype=BF16, cache_dtype=FP8, scales=scales))._replace(
        holds=lambda got: float(got[3].float().abs().max()) == 448
    )


def many(new: Inputs) -> Trial:
    """The tokens of 32 blocks; the interpreter takes 25 seconds for so many."""
    sizes = (512 if new.on_gpu else 8, 5, 8, 128, 128)
    return trial(projections(new, *sizes, dtype=BF16, cache_dtype=FP8))


def fp8_every_code(new: Inputs) -> Trial:
    """Every code, the midpoints between codes, their float32 neighbours, and beyond the range."""
    given = projections(new, tokens=11, cache_dtype=FP8)
    codes = torch.arange(127, dtype=torch.uint8).view(FP8).float()  # 0 .. 448, ascending
    middle = (codes[1:] + codes[:-1]) / 2
    up = torch.full_like(middle, torch.inf)
    points = torch.cat([codes, middle, middle.nextafter(up), middle.nextafter(-up), 500 * codes])
    points = torch.cat([points, -points])
    room = given.kv[:, :, 1]
    assert len(points) <= room.numel()
    room.copy_(points.repeat(4)[: room.numel()].view(room.shape))
    return trial(given)


def fp8_nan(new: Inputs) -> Trial:
    """A saturating conversion that hides NaN would hide a broken layer."""
    given = projections(new, tokens=1, cache_dtype=FP8)
    given.kv[0, 0, 1, 0, 3] = torch.nan
    return trial(given)._replace(holds=lambda got: int(got[3].float().isnan().sum()) == 1)


def negative_slots(new: Inputs) -> Trial:
    """Padded tokens have no slot, and any position."""
    given = projections(new, tokens=9)
    given.slots[::4] = -1
    given.positions[::4] = 10**15
    return trial(given)


def valid_prefixes(*lengths: int) -> Case:
    """Of every block only a prefix is written: nothing, some, all; a length past the block."""

    def make(new: Inputs) -> Trial:
        given = projections(new, tokens=12)
        return trial(given._replace(valid_lens=new.each(*lengths, dtype=torch.int32)))

    return Case(f"valid prefixes {lengths}", make, STEP[FP32])


def strided(new: Inputs) -> Trial:
    """Tokens lie apart, as when the projections are stacked with others."""
    given = projections(new, tokens=5)
    wide = new.floats(5, given.kv[0].numel() + 32)
    return trial(given._replace(kv=wide[:, :-32].view(given.kv.shape)))


def far(new: Inputs) -> Trial:
    """A pool of 2**25 slots of 2 x 64 elements; only the written slots are compared."""
    slots, size = 1 << 25, 1 << 32
    given = projections(new, tokens=2, layers=1)
    given = given._replace(slots=torch.tensor([slots - 1, slots // 2], device=new.device))

    def run(op: ModuleType) -> Sequence[Tensor]:
        keys, values = untouched(2 * size, torch.uint8, new.device).view(2, slots, 2, 64)
        caches = LayerCaches.of([keys.view(FP8)], [values.view(FP8)])
        op.context_kv(*given[:5], caches, eps=EPS)
        return [buffer[given.slots].view(FP8) for buffer in (keys, values)]

    return Trial(run)


# Sizes for the interpreter: on a GPU each would compile kernels of its own.
GRID = (
    *(of_size(tokens, heads=heads) for heads in (1, 3, 8) for tokens in (0, 1, 7, 33)),
    *(
        of_size(head_dim=head_dim, rotary_dim=rotary_dim)
        for head_dim, rotary_dim in ((64, 2), (64, 32), (80, 80), (96, 24), (128, 96))
    ),
)

CASES = (
    of_size(14, 2),
    of_size(head_dim=256, rotary_dim=64),
    of_size(15, 5, 8, 128, 128, BF16),
    of_size(21, 3, 1, 256, 64, FP16),
    of_size(16, 5, 8, 128, 128, FP8),
    Case("bfloat16 tables", low_precision_tables, STEP[BF16]),
    Case("FP8 with scales", fp8_scaled, STEP[FP8]),
    Case("FP8, every code", fp8_every_code, STEP[FP8]),
    Case("FP8, NaN", fp8_nan, STEP[FP8]),
    Case("negative slots", negative_slots, STEP[FP32]),
    valid_prefixes(0, 1, 3),
    valid_prefixes(2, 0, 1, 9),
    Case("tokens that lie apart", strided, STEP[FP32]),
    Case("FP8, 512 tokens on a GPU", many, STEP[FP8], large=True),
    Case("slots further apart than int32 reaches", far, STEP[FP8], large=True),
)


def for_server(shapes: ServerShapes) -> Iterator[Case]:
    """At a server's drafter and caches; FP8 caches without scales and with them."""
    # Two steps of the cache's rounding: the device's square root and division are approximate.
    tolerance = 2 * (2**-3 if shapes.cache_dtype.itemsize == 1 else 2**-8)

    def with_scales(scaled: bool) -> Case:
        def make(new: Inputs) -> Trial:
            sizes = (shapes.layers, shapes.kv_heads, shapes.head_dim, shapes.rotary_dim)
            scales = 1 + new.uniforms(shapes.layers, 2) if scaled else None
            given = projections(new, 14, *sizes, shapes.dtype, shapes.cache_dtype, scales)
            return trial(
                given._replace(
                    norm_weights=given.norm_weights.to(shapes.dtype),
                    cos_sin=given.cos_sin.to(shapes.rotary_dtype),
                )
            )

        return Case("context_kv with scales" if scaled else "context_kv", make, tolerance)

    yield with_scales(False)
    if shapes.cache_dtype == FP8:
        yield with_scales(True)
