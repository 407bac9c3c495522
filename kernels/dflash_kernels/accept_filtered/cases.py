"""Cases of `accept_filtered`: each filter alone and mixed, ties, rows of too many tokens."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_kernels.accept_filtered import reference
from dflash_kernels.accept_sampled.reference import accept_sampled
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
    padded,
)
from dflash_kernels.types import Acceptance, Filters, ServerShapes

ALL = 2**30  # top-k of a request that does not filter by it


class Given(NamedTuple):
    """Arguments of `accept_filtered`."""

    logits: Tensor
    draft_ids: Tensor
    prefix_lens: Tensor
    temperatures: Tensor
    seeds: Tensor
    filters: Filters


# (top-k, top-p, min-p); the fifth request does not filter.
MIXED = (
    (ALL, 0.9, 0.0),
    (20, 1.0, 0.0),
    (ALL, 1.0, 0.1),
    (50, 0.95, 0.02),
    (ALL, 1.0, 0.0),
    (1, 1.0, 0.0),
    (3, 0.3, 0.5),
)


def filters(device: torch.device, bs: int, *requests: tuple[int, float, float]) -> Filters:
    """These requests in turn, `bs` of them."""
    chosen = [requests[i % len(requests)] for i in range(bs)]
    dtypes = (torch.int32, FP32, FP32)
    columns = zip(*chosen, strict=True) if chosen else ((), (), ())
    return Filters(
        *(
            torch.tensor(values, dtype=dtype, device=device)
            for values, dtype in zip(columns, dtypes, strict=True)
        )
    )


def requests(
    new: Inputs,
    bs: int,
    width: int,
    columns: int,
    *chosen: tuple[int, float, float],
    dtype: torch.dtype = BF16,
) -> Given:
    """Logits of which a few stand out; drafts are what will be drawn in most columns."""
    logits = new.floats(bs * width, columns)
    logits[:, new.permutation(columns)[: columns // 50 + 1]] += 4.0
    logits = logits.to(dtype)
    draft_ids = new.ids(columns, bs, width)
    prefix_lens, temperatures = new.ids(2**33, bs), 0.6 + 0.6 * new.uniforms(bs)
    rest = prefix_lens, temperatures, new.seeds(bs), filters(new.device, bs, *chosen or MIXED)
    drawn = reference.accept_filtered(logits, draft_ids, *rest).output_ids
    keep = new.uniforms(bs, width - 1) < 0.2
    draft_ids[:, 1:] = torch.where(keep, draft_ids[:, 1:], drawn[:, :-1])
    return Given(logits, draft_ids, *rest)


def trial(given: Given, limit: Tensor | None = None) -> Trial:
    """Filter, draw and accept; a probability within 1e-7 of a limit could tell two forms apart."""
    return Trial(lambda op: op.accept_filtered(*given, limit=limit))


def of_size(bs: int, width: int, columns: int, dtype: torch.dtype = BF16) -> Case:
    """Requests of every kind."""
    name = f"{bs} x {width} x {columns} {name_of(dtype)}, every filter"
    return Case(name, lambda new: trial(requests(new, bs, width, columns, dtype=dtype)))


def alike(top_k: int = ALL, top_p: float = 1.0, min_p: float = 0.0) -> Case:
    """Requests with the same filters."""
    chosen = (top_k, top_p, min_p)
    name = f"top-k {top_k}, top-p {top_p}, min-p {min_p}"
    return Case(name, lambda new: trial(requests(new, 4, 3, 300, chosen)))


def few_maxima(new: Inputs) -> Trial:
    """Fewer maxima than k: no bound helps, and one row in eight would draw the next token."""
    return trial(requests(new, 40, 1, 20, (3, 1.0, 0.0), dtype=FP32))


def unfiltered(new: Inputs) -> Trial:
    """Without filters the draw is that of `accept_sampled`, and a greedy request's the argmax."""
    given = requests(new, 7, 2, 5000)
    logits, temperatures = given.logits, given.temperatures
    temperatures[5] = 0.0
    alone = accept_sampled(*given[:5])

    def holds(got: Acceptance) -> bool:
        greedy = torch.equal(got.output_ids[5], logits[10:12].float().argmax(1))
        return greedy and torch.equal(got.output_ids[4], alone.output_ids[4])

    return trial(given)._replace(holds=holds)


def ties(new: Inputs) -> Trial:
    """Three values; the second starts below the limits, so all of its tokens are kept."""
    given = requests(new, 7, 2, 5000)
    three = new.ids(3, 14, 5000).float() * 3
    return trial(given._replace(logits=three))._replace(
        holds=lambda got: got.output_ids.unique().numel() > 7
    )


def masked(new: Inputs) -> Trial:
    """A grammar leaves four ids; one row has nothing left at all."""
    given = requests(new, 7, 2, 5000)
    few = torch.full_like(given.logits, -torch.inf)
    allowed = torch.tensor([7, 4100, 4101, 4999], device=new.device)
    few[:, allowed] = given.logits[:, allowed]
    few[0, 7] = torch.nan
    few[5] = -torch.inf
    drawable = torch.cat([allowed, allowed.new_zeros(1)])
    return trial(given._replace(logits=few))._replace(
        holds=lambda got: bool(torch.isin(got.output_ids, drawable).all())
    )


def extreme(new: Inputs) -> Trial:
    """Logits of thousands, hundreds apart."""
    given = requests(new, 7, 2, 3000)
    return trial(given._replace(logits=given.logits.float() * 300 + 5000))


def limited(new: Inputs) -> Trial:
    """Limits from below zero to past the block, and padded rows."""
    given = requests(new, 7, 2, 640)
    limit = (torch.arange(7, device=new.device) % 5 - 1).to(torch.int32)
    return trial(given._replace(logits=padded(given.logits, 60)), limit)


def flat(new: Inputs) -> Trial:
    """More tokens above the bound than are gathered: the row is read again."""
    given = requests(new, 1, 1, 9000, (ALL, 0.97, 0.0))
    return trial(given._replace(logits=given.logits * 0.1))


def none(new: Inputs) -> Trial:
    """An empty batch."""
    logits, draft_ids = torch.zeros(0, 9, device=new.device), new.ids(9, 0, 4)
    empty = torch.zeros(0, device=new.device)
    rest = empty.long(), empty, empty.long(), filters(new.device, 0)
    given = Given(logits, draft_ids, *rest)
    return trial(given)._replace(holds=lambda got: got.output_ids.shape == (0, 4))


def far(new: Inputs) -> Trial:
    """Rows of logits 2**30 elements apart."""
    given = requests(new, 1, 3, 64)
    return trial(given._replace(logits=far_apart(given.logits)))


def vocabulary(columns: int) -> Case:
    """A whole vocabulary."""

    def make(new: Inputs) -> Trial:
        return trial(requests(new, 7 if new.on_gpu else 2, 2 if new.on_gpu else 1, columns))

    return Case(f"vocabulary {columns}", make, large=True)


# Sizes for the interpreter: on a GPU each would compile kernels of its own.
GRID = tuple(
    of_size(bs, width, columns)
    for bs, width in ((1, 1), (7, 2))
    for columns in (1, 50, 4095, 4097, 9000)
)

CASES = (
    *(of_size(7, 1, 700, dtype) for dtype in (FP32, FP16)),
    alike(top_k=1),
    alike(top_k=40),
    alike(top_k=299),
    alike(top_p=0.01),
    alike(top_p=0.999),
    alike(min_p=1.0),
    alike(min_p=0.001),
    alike(top_k=30, top_p=0.8, min_p=0.01),
    Case("fewer maxima than top-k", few_maxima),
    Case("requests that do not filter", unfiltered),
    Case("equal logits", ties),
    Case("masked logits, NaN, a row without any", masked),
    Case("extreme logits", extreme),
    Case("limits and padded rows", limited),
    Case("a flat row", flat),
    Case("no requests", none),
    *(vocabulary(columns) for columns in VOCABULARIES),
    Case("rows further apart than int32 reaches", far, large=True),
)


def for_server(shapes: ServerShapes) -> Iterator[Case]:
    """At a server's widths and vocabulary: a request with every filter, and a greedy one.

    Limits are those of `accept_sampled`, which ends in the same kernel.
    """

    def at(width: int) -> Case:
        def make(new: Inputs) -> Trial:
            # Few rows: the reference takes ten float64 copies of them, 0.8 GB at width 16.
            chosen = (50, 0.95, 0.02), (1, 1.0, 0.0)
            given = requests(new, 2, width, shapes.vocab_size, *chosen, dtype=FP32)
            given.temperatures[1] = 0.0
            return trial(given)

        return Case(f"accept_filtered at width {width}", make)

    return map(at, shapes.widths)
