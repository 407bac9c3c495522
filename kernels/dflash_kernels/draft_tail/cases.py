"""Cases of `draft_tail`: one tile and several, ties, padding, numbers that are not finite."""

from collections.abc import Iterator

import torch
from torch import Tensor

from dflash_kernels.case import (
    BF16,
    FP16,
    FP32,
    VOCABULARIES,
    Case,
    Inputs,
    Trial,
    far_apart,
    name_of,
)
from dflash_kernels.types import ServerShapes, Tail

# Float32 sums of exp in another order, and a GPU's approximate exp and log: 1e-6 each.
TOLERANCE = 2e-5


def noise(new: Inputs, rows: int, columns: int, dtype: torch.dtype = BF16) -> Tensor:
    """Logits [rows, columns]; bfloat16 ones repeat within a row, so ties occur."""
    return new.floats(rows, columns, dtype=dtype, scale=4.0)


def trial(logits: Tensor, top: int, num_ids: int | None = None) -> Trial:
    """The tail of all columns, or of the first `num_ids`: the others are never chosen."""
    valid = logits.shape[1] if num_ids is None else num_ids

    def holds(got: Tail) -> bool:
        return bool((got.ids < valid).all())

    return Trial(lambda op: op.draft_tail(logits, num_ids=valid, top=top), holds)


def of_size(rows: int, columns: int, top: int, dtype: torch.dtype = BF16) -> Case:
    """All columns of a number of rows."""
    name = f"{rows} x {columns} {name_of(dtype)}, top {top}"
    return Case(name, lambda new: trial(noise(new, rows, columns, dtype), top), TOLERANCE)


def vocabulary(columns: int, dtype: torch.dtype, top: int) -> Case:
    """A whole vocabulary, a fiftieth of it padding."""

    def make(new: Inputs) -> Trial:
        logits = noise(new, 32 if new.on_gpu else 1, columns, dtype)
        return trial(logits, top, columns - columns // 50)

    return Case(f"vocabulary {columns} {name_of(dtype)}, top {top}", make, TOLERANCE, large=True)


def padding(top: int) -> Case:
    """The largest logits are past the vocabulary."""

    def make(new: Inputs) -> Trial:
        logits = noise(new, 3, 5000)
        logits[:, 4500:] = 100.0
        return trial(logits, top, 4500)

    return Case(f"padding, top {top}", make, TOLERANCE)


def ties(top: int) -> Case:
    """Three values within and between tiles, and a row of one: the smallest id comes first."""

    def make(new: Inputs) -> Trial:
        logits = new.ids(3, 4, 5000).to(BF16)
        logits[3] = 0.0
        return trial(logits, top)._replace(
            holds=lambda got: got.ids[3].tolist() == list(range(top))
        )

    return Case(f"ties, top {top}", make, TOLERANCE)


def special(new: Inputs) -> Trial:
    """Signs, zeros of both signs, NaN, and rows without a finite logit."""
    logits = torch.full((6, 300), -torch.inf, device=new.device)
    logits[0, 7], logits[0, 9] = -3.0, -2.0  # all finite values negative
    logits[1, 5], logits[1, 6] = 0.0, -0.0  # equal
    logits[2, 5], logits[2, 6] = -0.0, 0.0
    logits[3, 3], logits[3, 4] = torch.nan, -1.0
    logits[4] = torch.nan

    def holds(got: Tail) -> bool:
        assert got.lse is not None
        first = got.ids[:, 0].tolist() == [9, 5, 5, 4, 0, 0]
        return first and got.lse[4:].tolist() == [-torch.inf] * 2

    return trial(logits, 3)._replace(holds=holds)


def peaked(new: Inputs) -> Trial:
    """Logits far from zero: exp of them would overflow."""
    logits = noise(new, 2, 4100, FP32) + 500.0
    logits[1, 4099] = 900.0
    return Trial(
        lambda op: op.draft_tail(logits, num_ids=4100),
        lambda got: bool((got.values[1] - got.lse[1]).exp() == 1.0),
    )


# Sizes for the interpreter: on a GPU each would compile kernels of its own.
GRID = (
    *(of_size(3, n, k) for n in (32, 1000, 4095, 4096, 4097, 5000) for k in (1, 5, 32)),
    of_size(2, 777, 3, FP32),
    *(make(top) for make in (padding, ties) for top in (1, 4, 32)),
)

CASES = (
    of_size(3, 1, 1, FP32),
    of_size(3, 777, 1, FP16),
    of_size(3, 777, 20, FP16),
    *(of_size(2, 4095, top) for top in (1, 20)),
    *(of_size(5, 4097, top) for top in (1, 20)),
    *(of_size(4, 5000, top, FP32) for top in (1, 20)),
    of_size(0, 64, 1),
    padding(20),
    ties(20),
    Case("signs, zeros, NaN, no finite logit", special, TOLERANCE),
    Case("a peaked row far from zero", peaked, TOLERANCE),
    *(vocabulary(n, BF16, top) for n, top in zip(VOCABULARIES, (20, 1), strict=True)),
    *(vocabulary(n, FP32, top) for n, top in zip(VOCABULARIES, (1, 20), strict=True)),
    Case(
        "rows further apart than int32 reaches",
        lambda new: trial(far_apart(noise(new, 3, 64)), 2),
        TOLERANCE,
        large=True,
    ),
)


def for_server(shapes: ServerShapes) -> Iterator[Case]:
    """At a server's head and dtype."""

    def make(new: Inputs) -> Trial:
        logits = noise(new, 8, shapes.head_columns, shapes.head_dtype)
        return trial(logits, shapes.top, shapes.head_ids)

    # 1e-5 of the normaliser, whose float32 sums have another order.
    yield Case("draft_tail", make, 1e-5)
