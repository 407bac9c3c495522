"""Cases of `accept_match`: widths around powers of two, every accept length, limits, exceptions."""

from collections.abc import Iterator

import torch
from torch import Tensor

from dflash_kernels.case import Case, Inputs, Trial
from dflash_kernels.types import ServerShapes

Given = tuple[Tensor, Tensor, Tensor]  # drafts, verifier ids, prefix lengths


def blocks(new: Inputs, bs: int, width: int) -> Given:
    """Two drafts in three match and one request matches whole, so that every length occurs."""
    draft_ids, verifier_ids = new.ids(10**12, bs, width), new.ids(10**12, bs, width)
    match = new.uniforms(bs, width - 1) < 2 / 3
    match[:1] = True
    verifier_ids[:, :-1] = torch.where(match, draft_ids[:, 1:], verifier_ids[:, :-1])
    return draft_ids, verifier_ids, new.ids(2**33, bs)


def options_of(new: Inputs, bs: int, width: int) -> dict[str, Tensor]:
    """Limits below zero, zero, inside and past the block; every second draft an exception."""
    return {
        "limit": new.ids(width + 2, bs, low=-1, dtype=torch.int32),
        "extra_accept": new.uniforms(bs, width - 1) < 0.5,
    }


def plain(bs: int, width: int) -> Case:
    """Without options; the many rows of 63 requests have every length."""

    def make(new: Inputs) -> Trial:
        given = blocks(new, bs, width)
        return Trial(
            lambda op: op.accept_match(*given),
            lambda got: bs < 63 or {0, width - 1} <= set(got.accept_len.tolist()),
        )

    return Case(f"{bs} x {width}", make)


def with_options(width: int, *names: str, bs: int = 63) -> Case:
    """With a limit, with exceptions, or with both."""

    def make(new: Inputs) -> Trial:
        given, options = blocks(new, bs, width), options_of(new, bs, width)
        chosen = {name: options[name] for name in names}
        return Trial(lambda op: op.accept_match(*given, **chosen))

    return Case(f"{bs} x {width}, {' and '.join(names)}", make)


def strided(new: Inputs) -> Trial:
    """Slices of a wider block, and int32 prefixes, as SGLang's workers keep them."""
    draft_ids, verifier_ids, prefix_lens = blocks(new, 5, 16)
    extra_accept = (new.uniforms(5, 15) < 0.5)[:, :5]
    given = draft_ids[:, :6], verifier_ids[:, :6], (prefix_lens % 1000).to(torch.int32)
    return Trial(lambda op: op.accept_match(*given, extra_accept=extra_accept))


# Sizes for the interpreter: on a GPU each would compile kernels of its own.
GRID = (
    *(plain(bs, width) for width in (1, 2, 7, 16, 17) for bs in (0, 1, 63)),
    *(
        with_options(width, *names)
        for width in (1, 3, 16)
        for names in (("limit",), ("extra_accept",), ("limit", "extra_accept"))
    ),
)

CASES = (
    plain(1, 1),
    plain(63, 16),
    plain(65, 5),
    *(with_options(width, "limit", "extra_accept", bs=65) for width in (1, 5, 16)),
    Case("rows that lie apart, int32 prefixes", strided),
)


def for_server(shapes: ServerShapes) -> Iterator[Case]:
    """At a server's widths, with and without each option."""
    for width in shapes.widths:
        for names in ((), ("limit",), ("extra_accept",), ("limit", "extra_accept")):
            case = with_options(width, *names, bs=7)
            yield case._replace(name=" ".join((f"accept_match at width {width}", *names)))
