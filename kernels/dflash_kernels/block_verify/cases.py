"""Cases of `block_verify` and `token_wise`: every length and tile, limits, p = q, residuals."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_kernels.block_verify import reference
from dflash_kernels.case import (
    BF16,
    FP16,
    VOCABULARIES,
    Case,
    Inputs,
    Trial,
    far_apart,
    name_of,
    padded,
)
from dflash_kernels.types import Acceptance, Proposal, ServerShapes

RULES = ("block_verify", "token_wise")
BELOW_ONE = 1 - 2.0**-24  # the largest float32 uniform number


class Given(NamedTuple):
    """Arguments of both rules."""

    draft_ids: Tensor
    proposal: Proposal
    verifier_probs: Tensor
    uniforms: Tensor
    prefix_lens: Tensor


def requests(
    new: Inputs, bs: int, width: int, columns: int, top: int, elsewhere: float = 0.2
) -> Given:
    """Drafts drawn from a proposal that resembles the verifier's distribution.

    The verifier has a probability of `elsewhere` at tokens that are not proposed, and disagrees
    about the others by a factor of two or so: ratios below 1, and every accept length.
    """
    top_ids = new.floats(bs, width - 1, columns).topk(top, dim=2).indices
    scores = new.floats(bs, width - 1, top)
    top_probs = scores.softmax(dim=2)
    verifier_probs = elsewhere * new.floats(bs, width, columns, scale=2.0).softmax(dim=2)
    agreed = (scores + new.floats(bs, width - 1, top, scale=0.7)).softmax(dim=2)
    verifier_probs[:, :-1].scatter_add_(2, top_ids, (1 - elsewhere) * agreed)
    verifier_probs /= verifier_probs.sum(dim=2, keepdim=True)
    chance = new.uniforms(bs * (width - 1))
    choice = reference.draw(top_probs.reshape(-1, top), chance).view(bs, width - 1, 1)
    draft_ids = torch.cat([new.ids(columns, bs, 1), top_ids.gather(2, choice).squeeze(2)], dim=1)
    proposal = Proposal(top_ids, top_probs)
    return Given(draft_ids, proposal, verifier_probs, new.uniforms(bs, width), new.ids(2**33, bs))


def trial(rule: str, given: Given, limit: Tensor | None = None) -> Trial:
    """One rule; it decides in float64, so that every token must be the reference's."""
    return Trial(lambda op: getattr(op, rule)(*given, limit=limit))


def of_size(rule: str, bs: int, width: int, columns: int, top: int) -> Case:
    """A batch, a width, a vocabulary and K."""
    name = f"{rule}, {bs} x {width} x {columns}, top {top}"
    return Case(name, lambda new: trial(rule, requests(new, bs, width, columns, top)))


def every_length(rule: str, new: Inputs) -> Trial:
    """Every accept length, and bonus tokens in each of the three tiles of 2,048 columns."""

    def holds(got: Acceptance) -> bool:
        tiles = set((got.bonus_ids // 2048).tolist())
        return set(got.accept_len.tolist()) == {0, 1, 2, 3} and tiles == {0, 1, 2}

    return trial(rule, requests(new, 48, 4, 5000, 8, elsewhere=0.4))._replace(holds=holds)


def ratios_below_one(rule: str, new: Inputs) -> Trial:
    """Residuals that only the block rule's running ratio explains."""
    given = requests(new, 48, 4, 300, 8)
    ratios = reference.running_ratios(*given[:3])

    def holds(got: Acceptance) -> bool:
        length = got.accept_len.to(torch.int64)[:, None]
        return int(((length < 3) & (ratios.gather(1, length) < 0.9)).sum()) >= 5

    return trial(rule, given)._replace(holds=holds)


def limited(rule: str, new: Inputs) -> Trial:
    """Limits from below zero to past the block."""
    limit = (torch.arange(36, device=new.device) % 6 - 1).to(torch.int32)
    return trial(rule, requests(new, 36, 4, 64, 6), limit)


def filtered(rule: str, new: Inputs) -> Trial:
    """Top-k of the verifier left few ids, and some proposed ones have no probability at all."""
    given = requests(new, 40, 4, 4200, 6)
    kept = given.verifier_probs.topk(3, dim=2)
    few = torch.zeros_like(given.verifier_probs).scatter_(2, kept.indices, kept.values)
    few /= few.sum(dim=2, keepdim=True)
    given.uniforms[::2, -1] = BELOW_ONE  # the last id with weight
    given.uniforms[1::4, -1] = 0.0  # the first
    row = torch.arange(40, device=new.device)
    return trial(rule, given._replace(verifier_probs=few))._replace(
        holds=lambda got: bool((few[row, got.accept_len.long(), got.bonus_ids] > 0).all())
    )


def agreeing(rule: str, new: Inputs) -> Trial:
    """P = q at every position, where the rules divide 0 by 0; powers of two, so sums are exact."""
    top_ids = torch.arange(8, device=new.device).expand(5, 3, 8).contiguous()
    proposal = Proposal(top_ids, torch.full((5, 3, 8), 0.125, device=new.device))
    probs = torch.zeros(5, 4, 12, device=new.device)
    probs[..., :8] = 0.125
    given = Given(new.ids(8, 5, 4), proposal, probs, new.uniforms(5, 4), new.ids(9, 5))
    return trial(rule, given)._replace(holds=lambda got: got.accept_len.tolist() == [3] * 5)


def without_mass(_rule: str, new: Inputs) -> Trial:
    """Token-wise, p = q but for a hair at the draft, and a uniform number between them.

    The draft is rejected and nothing of p is above q, so the bonus comes from the whole of p.
    """
    below = float(torch.nextafter(torch.tensor(0.5), torch.tensor(0.0)))
    proposal = Proposal(new.ids(3, 1, 1, 2), new.each(0.5, 0.5).view(1, 1, 2))
    proposal.top_ids[:] = new.each(1, 2).long()
    probs = new.each(0.0, below, 0.5, 0.0).repeat(1, 2, 1)
    uniforms = new.each(BELOW_ONE, 0.75)[None]
    given = Given(new.each(0, 1).long()[None], proposal, probs, uniforms, new.ids(9, 1))
    return trial("token_wise", given)._replace(
        holds=lambda got: (got.accept_len.item(), got.bonus_ids.item()) == (0, 2)
    )


def strided(rule: str, new: Inputs) -> Trial:
    """A narrower verify takes slices of everything; the vocabulary may be padded."""
    wide = requests(new, 5, 8, 640, 4)
    proposal = Proposal(*(columns[:, :3] for columns in wide.proposal))
    probs = padded(wide.verifier_probs, 60)[:, :4]
    lens = wide.prefix_lens.to(torch.int32)
    return trial(rule, Given(wide.draft_ids[:, :4], proposal, probs, wide.uniforms[:, :4], lens))


def far(rule: str, new: Inputs, dim: int) -> Trial:
    """Requests (dim 0) or rows (dim 1) 2**30 elements apart; all drafts are accepted."""
    bs, width = (3, 2) if dim == 0 else (1, 3)
    given = requests(new, bs, width, 64, 3)
    probs = far_apart(given.verifier_probs.to(BF16), dim)
    given = given._replace(verifier_probs=probs, uniforms=given.uniforms * 1e-3)
    return trial(rule, given)._replace(
        holds=lambda got: got.accept_len.tolist() == [width - 1] * bs
    )


def none(rule: str, new: Inputs) -> Trial:
    """An empty batch."""
    given = requests(new, 2, 3, 9, 2)
    proposal = Proposal(*(columns[:0] for columns in given.proposal))
    empty = Given(given.draft_ids[:0], proposal, *(columns[:0] for columns in given[2:]))
    return trial(rule, empty)._replace(holds=lambda got: got.output_ids.shape == (0, 3))


def other_dtype(rule: str, dtype: torch.dtype) -> Case:
    """Probabilities that are not float32."""

    def make(new: Inputs) -> Trial:
        given = requests(new, 6, 4, 300, 5)
        return trial(rule, given._replace(verifier_probs=given.verifier_probs.to(dtype)))

    return Case(f"{rule}, {name_of(dtype)}", make)


def vocabulary(rule: str, columns: int) -> Case:
    """A whole vocabulary."""

    def make(new: Inputs) -> Trial:
        bs, width = (4, 16) if new.on_gpu else (1, 2)
        return trial(rule, requests(new, bs, width, columns, 20))

    return Case(f"{rule}, vocabulary {columns}", make, large=True)


def named(rule: str, name: str, make: Callable[[str, Inputs], Trial], large: bool = False) -> Case:
    """One of the regimes above, for a rule."""
    return Case(f"{rule}, {name}", lambda new: make(rule, new), large=large)


# Sizes for the interpreter: on a GPU each would compile kernels of its own.
GRID = tuple(
    of_size(rule, bs, width, columns, top)
    for rule in RULES
    for bs, width, top in ((1, 1, 5), (3, 5, 1), (7, 2, 3), (4, 16, 20))
    for columns in (20, 2047, 2049, 5000)
)

CASES = (
    *(of_size(rule, 1, 1, 30, 4) for rule in RULES),
    *(of_size(rule, 3, 5, 50, 3) for rule in RULES),
    *(of_size(rule, 9, 16, 2049, 20) for rule in RULES),
    *(named(rule, "every length and tile", every_length) for rule in RULES),
    named("block_verify", "ratios below 1", ratios_below_one),
    *(named(rule, "limits", limited) for rule in RULES),
    *(named(rule, "filtered verifier", filtered) for rule in RULES),
    *(named(rule, "p = q", agreeing) for rule in RULES),
    named("token_wise", "a residual without mass", without_mass),
    *(other_dtype(rule, t) for rule in RULES for t in (FP16, BF16, torch.float64)),
    *(named(rule, "slices and padding", strided) for rule in RULES),
    *(named(rule, "no requests", none) for rule in RULES),
    *(vocabulary(rule, columns) for rule in RULES for columns in VOCABULARIES),
    *(
        named(rule, f"{apart} further apart than int32 reaches", make, large=True)
        for rule in RULES
        for apart, make in (
            ("requests", lambda rule, new: far(rule, new, 0)),
            ("rows", lambda rule, new: far(rule, new, 1)),
        )
    ),
)


def for_server(shapes: ServerShapes) -> Iterator[Case]:
    """At a server's widths and vocabulary, by its rule; nothing where drafts are matched."""
    rule = shapes.rejection
    if rule is None:
        return

    def at(width: int, limited: bool) -> Case:
        def make(new: Inputs) -> Trial:
            limit = new.ids(width, 2, dtype=torch.int32) if limited else None
            return trial(rule, requests(new, 2, width, shapes.vocab_size, shapes.top), limit)

        return Case(f"{rule} at width {width}{' limit' if limited else ''}", make)

    for width in shapes.widths:
        if width > 1:  # else nothing is drafted
            yield at(width, limited=False)
            yield at(width, limited=True)
