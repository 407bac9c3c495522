"""Cases of `accept_sampled`: draws that float64 decides, greedy and masked rows, limits."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_kernels.accept_sampled import reference
from dflash_kernels.accept_sampled.hashing import gumbel, murmur_hash32
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
from dflash_kernels.types import Acceptance, ServerShapes


class Given(NamedTuple):
    """Arguments of `accept_sampled`."""

    logits: Tensor
    draft_ids: Tensor
    prefix_lens: Tensor
    temperatures: Tensor
    seeds: Tensor


def requests(
    new: Inputs,
    bs: int,
    width: int,
    columns: int,
    scale: float = 2.0,
    dtype: torch.dtype = BF16,
) -> Given:
    """Random logits; drafts are what will be drawn, but for about one column in five."""
    logits = new.floats(bs * width, columns, dtype=dtype, scale=scale)
    given = new.ids(2**33, bs), 0.3 + new.uniforms(bs), new.seeds(bs)
    draft_ids = new.ids(columns, bs, width)
    drawn = reference.accept_sampled(logits, draft_ids, *given).output_ids
    keep = new.uniforms(bs, width - 1) < 0.2
    draft_ids[:, 1:] = torch.where(keep, draft_ids[:, 1:], drawn[:, :-1])
    return Given(logits, draft_ids, *given)


def trial(given: Given, limit: Tensor | None = None) -> Trial:
    """Draw and accept; every draw must be the reference's, which float64 decides in both."""
    return Trial(lambda op: op.accept_sampled(*given, limit=limit))


def of_size(
    bs: int, width: int, columns: int, scale: float = 2.0, dtype: torch.dtype = BF16
) -> Case:
    """A batch, a width, a vocabulary, and how far its logits are spread."""
    name = f"{bs} x {width} x {columns} {name_of(dtype)}, logits of {scale:g}"
    return Case(name, lambda new: trial(requests(new, bs, width, columns, scale, dtype)))


def every_length(new: Inputs) -> Trial:
    """Many short rows."""
    lengths = {0, 1, 2, 3}
    return trial(requests(new, 28, 4, 300))._replace(
        holds=lambda got: set(got.accept_len.tolist()) == lengths
    )


def near_ties(new: Inputs) -> Trial:
    """Logits that undo the noise: all 300 scores of a row agree to a float32's last bits."""
    rows, columns = 6, 300
    prefix_lens = torch.arange(rows, device=new.device) * 10
    seeds = torch.arange(rows, device=new.device) + 5
    ids = torch.arange(columns, device=new.device)
    logits = (20.0 - gumbel(murmur_hash32(seeds, prefix_lens, ids))).to(FP32)
    draft_ids = torch.zeros(rows, 1, dtype=torch.int64, device=new.device)
    one = torch.ones(rows, device=new.device)
    return trial(Given(logits, draft_ids, prefix_lens, one, seeds))


def greedy(new: Inputs) -> Trial:
    """Greedy requests beside drawn ones, one of them with ties in both tiles."""
    given = requests(new, 4, 3, 4500)
    logits, temperatures = given.logits, given.temperatures
    temperatures[1::2] = 0.0
    logits[9:] = 1.0

    def holds(got: Acceptance) -> bool:
        first = torch.equal(got.output_ids[1], logits[3:6].float().argmax(1))
        return first and got.output_ids[3].tolist() == [0, 0, 0]

    return trial(given)._replace(holds=holds)


def masked(new: Inputs) -> Trial:
    """A grammar leaves few ids, none in the first tile; one row has nothing left at all."""
    given = requests(new, 2, 3, 5000)
    allowed = torch.tensor([4100, 4101, 4999], device=new.device)
    few = torch.full_like(given.logits, -torch.inf)
    few[:, allowed] = given.logits[:, allowed]
    few[0, 7] = torch.nan
    few[5] = -torch.inf

    def holds(got: Acceptance) -> bool:
        drawn = got.output_ids.flatten()
        return bool(torch.isin(drawn[:5], allowed).all() and drawn[5] == 0)

    return trial(given._replace(logits=few))._replace(holds=holds)


def limited(new: Inputs) -> Trial:
    """Limits from below zero to past the block."""
    limit = (torch.arange(18, device=new.device) % 6 - 1).to(torch.int32)
    return trial(requests(new, 18, 4, 64), limit)


def with_padding(new: Inputs) -> Trial:
    """Logits are the valid columns of a padded matrix."""
    given = requests(new, 2, 3, 640)
    return trial(given._replace(logits=padded(given.logits, 60)))


def none(new: Inputs) -> Trial:
    """An empty batch."""
    empty = torch.zeros(0, device=new.device)
    logits, draft_ids = torch.zeros(0, 9, device=new.device), new.ids(9, 0, 4)
    return Trial(
        lambda op: op.accept_sampled(logits, draft_ids, empty.long(), empty, empty.long()),
        lambda got: got.output_ids.shape == (0, 4),
    )


def far(new: Inputs) -> Trial:
    """Rows of logits 2**30 elements apart."""
    given = requests(new, 1, 3, 64)
    return trial(given._replace(logits=far_apart(given.logits)))


def vocabulary(columns: int, dtype: torch.dtype) -> Case:
    """A whole vocabulary, every second request greedy."""

    def make(new: Inputs) -> Trial:
        given = requests(new, *((8, 4) if new.on_gpu else (1, 1)), columns, 2.0, dtype)
        given.temperatures[1::2] = 0.0
        return trial(given)

    return Case(f"vocabulary {columns} {name_of(dtype)}", make, large=True)


# Sizes for the interpreter: on a GPU each would compile kernels of its own.
GRID = tuple(
    of_size(bs, width, columns)
    for bs, width in ((1, 1), (3, 5), (2, 16))
    for columns in (1, 50, 4095, 4097, 5000)
)

CASES = (
    of_size(1, 3, 1, dtype=FP32),
    of_size(2, 1, 4095),
    of_size(1, 5, 4097),
    of_size(1, 4, 5000, dtype=FP32),
    *(of_size(2, 3, 700, dtype=dtype) for dtype in (FP32, FP16)),
    # Flat: noise alone decides, near ties are frequent. Extreme: float32 resolves 1e-4 of a score.
    *(of_size(8, 4, 3000, scale) for scale in (0.0, 1e-4, 1e3)),
    Case("every accept length", every_length),
    Case("near ties", near_ties),
    Case("greedy requests beside drawn ones", greedy),
    Case("masked logits, NaN, a row without any", masked),
    Case("limits", limited),
    Case("padded rows", with_padding),
    Case("no requests", none),
    *(vocabulary(columns, dtype) for columns in VOCABULARIES for dtype in (BF16, FP32)),
    Case("rows further apart than int32 reaches", far, large=True),
)


def for_server(shapes: ServerShapes) -> Iterator[Case]:
    """At a server's widths and vocabulary, in float32, to which SGLang's logits processor casts."""

    def at(width: int, limited: bool) -> Case:
        def make(new: Inputs) -> Trial:
            # Few rows: the reference takes ten float64 copies of them.
            given = requests(new, 2, width, shapes.vocab_size, dtype=FP32)
            given.temperatures[0] = 0.0  # greedy
            limit = new.ids(width, 2, dtype=torch.int32) if limited else None
            return trial(given, limit)

        return Case(f"accept_sampled at width {width}{' limit' if limited else ''}", make)

    for width in shapes.widths:
        yield at(width, limited=False)
        yield at(width, limited=True)
