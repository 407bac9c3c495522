"""Cases of `verify_bound`: every bound, every class, ties, prices that forbid, no finite logit."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import inf

import torch
from torch import Tensor

from dflash_kernels.case import Case, Inputs, Trial
from dflash_kernels.types import ServerShapes
from dflash_kernels.verify_bound.reference import CLASSES, EDGES

Given = tuple[Tensor, Tensor, Tensor, Tensor]


def given_for(new: Inputs, classes: Sequence[int], prices: Sequence[float]) -> Given:
    """`inputs` of numbers on the host."""
    return inputs(new, new.each(*classes, dtype=torch.int64), new.each(*prices))


def inputs(new: Inputs, classes: Tensor, prices: Tensor) -> Given:
    """Positions in the middle of their classes; acceptance in sixteenths, so that sums are exact.

    Products of up to four of them are exact in float32, and so is any order of adding them up:
    equal values are equal on every device.
    """
    middles = [(low + high) / 2 for low, high in pairwise((0.0, *EDGES, 1.0))]
    confidence = new.each(*middles)[classes]
    lse = new.floats(len(classes), scale=5.0)
    acceptance = (torch.arange(1, CLASSES + 1) / 16).to(torch.float32).to(new.device)
    return confidence.log() + lse, lse, acceptance, prices


def trial(new: Inputs, classes: list[int], prices: list[float], bound: int) -> Trial:
    """Whose result is known."""
    given = given_for(new, classes, prices)
    return Trial(
        lambda op: [op.verify_bound(*given)],
        lambda got: got[0].tolist() == [bound, bound - 1, *classes],
    )


def stops_behind(drafts: int, good: int) -> Case:
    """The first `good` drafts pay, and none behind them."""

    def make(new: Inputs) -> Trial:
        classes = [CLASSES - 1] * good + [0] * (drafts - good)
        # One more sure draft commits 11/16 of what the one before it does, at least 0.011.
        prices = [0.005 * d for d in range(drafts + 1)]
        survival = [(11 / 16) ** (i + 1) for i in range(good)]
        bound = 1 + sum(one > 0.005 for one in survival)
        after = (11 / 16) ** good / 16
        return trial(new, classes, prices, bound + (good < drafts and after > 0.005))

    return Case(f"{good} of {drafts} drafts are good", make)


def random(drafts: int, *, seed: int) -> Case:
    """Any classes and prices; values are apart by construction, by a price of its own each."""

    def make(new: Inputs) -> Trial:
        given = inputs(new, new.ids(CLASSES, drafts), new.ids(64, drafts + 1) * 0.03)
        return Trial(lambda op: [op.verify_bound(*given)])

    return Case(f"{drafts} drafts, any price, {seed}", make)


def every_class(new: Inputs) -> Trial:
    """And the anchor alone: all prices but the first are too high."""
    return trial(new, list(range(CLASSES)), [0.0] + [9.0] * CLASSES, 1)


def equals(new: Inputs) -> Trial:
    """Two numbers of drafts are worth the same: the larger one is verified."""
    # 11/16, then 11/16 * 1/16 at that price.
    return trial(new, [10, 0, 0], [0.0, 0.0, 11 / 256, 9.0], 3)


def free(new: Inputs) -> Trial:
    """Nothing has a price: all is verified, however unlikely."""
    return trial(new, [0] * 15, [0.0] * 16, 16)


def forbidden(new: Inputs) -> Trial:
    """An infinite price: a request that may commit three tokens."""
    return trial(new, [10] * 7, [0.0, 0.0, 0.0, *[inf] * 5], 3)


def not_finite(new: Inputs) -> Trial:
    """A row without a finite logit, and one whose normaliser is infinite, are in class 0."""
    given = given_for(new, [10, 10, 10], [0.0] * 4)
    given[0][:2] = -inf
    given[1][0], given[1][1] = -inf, inf
    return Trial(
        lambda op: [op.verify_bound(*given)], lambda got: got[0].tolist() == [4, 3, 0, 0, 10]
    )


def strided(new: Inputs) -> Trial:
    """A column of the tail's [rows, K] values."""
    values, lse, acceptance, prices = given_for(new, [9, 3, 7], [0.0, 0.1, 0.2, 0.3])
    column = torch.stack([values, values + 100], dim=1)[:, 0]
    return Trial(lambda op: [op.verify_bound(column, lse, acceptance, prices)])


def at_edges(new: Inputs) -> Trial:
    """A probability of 1 is in the last class, one that underflows in the first."""
    values, lse = new.each(3.0, -200.0), new.each(3.0, 0.0)
    given = (values, lse, *given_for(new, [0, 0], [0.0, 0.0, 0.0])[2:])
    return Trial(lambda op: [op.verify_bound(*given)], lambda got: got[0].tolist() == [3, 2, 10, 0])


GRID = (
    *(stops_behind(drafts, good) for drafts in (1, 7, 15) for good in range(drafts + 1)),
    *(random(drafts, seed=seed) for drafts in (1, 2, 3, 15, 31) for seed in range(4)),
)

CASES = (
    Case("every class", every_class),
    Case("equals", equals),
    Case("free", free),
    Case("an infinite price", forbidden),
    Case("not finite", not_finite),
    Case("a column of a matrix", strided),
    Case("probabilities 0 and 1", at_edges),
    stops_behind(15, 4),
    random(63, seed=0),
)


def for_server(shapes: ServerShapes) -> Iterator[Case]:
    """At a server's widths."""
    for width in shapes.widths:
        if width > 1:  # else nothing is drafted
            yield random(width - 1, seed=0)._replace(name=f"verify_bound at width {width}")
