"""Acceptance traces for the width simulator: which drafts of which request hold, step by step.

A trace does not depend on the widths that are chosen: a request lasts as many steps at any width,
and its step n has the accept length of a whole block, of which a narrower verify sees the
beginning. Every contender therefore meets exactly the same drafts.
"""

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from random import Random
from typing import NamedTuple

BLOCK_SIZE = 16


class Drafts(NamedTuple):
    """What a request's step has drafted."""

    accept_len: int  # of a whole block
    confidences: Sequence[float] | None = None  # the drafter's probability of each, if recorded


# The drafts of a request's steps, all of them.
Family = Callable[[Random], list[Drafts]]


class Step(NamedTuple):
    """One decode step of a batch."""

    keys: list[int]  # requests
    drafts: list[Drafts]  # of each
    segment: int  # of the workload

    @property
    def accept_lens(self) -> list[int]:
        """Of each request, of a whole block."""
        return [one.accept_len for one in self.drafts]


class Workload(NamedTuple):
    """What requests come in."""

    name: str
    # One after the other, equally many steps each; the requests of a segment take its families in
    # turn, and those that are running when it begins change with it.
    segments: tuple[tuple[Family, ...], ...]


def curve(acceptance: Sequence[float], steps: int = 80) -> Family:
    """Requests whose draft i holds with probability `acceptance[i - 1]` if those before it do."""
    survival, below = 1.0, []
    for probability in acceptance:
        survival *= probability
        below.append(1 - survival)  # P(accept length < i), ascending

    def draw(rng: Random) -> list[Drafts]:
        return [Drafts(bisect_right(below, rng.random())) for _ in range(steps)]

    return draw


def geometric(acceptance: float) -> Family:
    """The same probability at every position."""
    return curve([acceptance] * (BLOCK_SIZE - 1))


def recorded(requests: Sequence[Sequence[Drafts]]) -> Family:
    """Requests that were really served, drawn with replacement."""
    return lambda rng: list(rng.choice(requests))


def load_recorded(file: Path) -> dict[str, Family]:
    """Families of a file `{"families": {name: [[accept length of each step] of each request]}}`.

    Its `confidences` have the drafter's probabilities of the drafts in their places.

    Raises:
        ValueError: an accept length does not fit the block.
    """
    content = json.loads(file.read_text())
    families: Mapping[str, list[list[int]]] = content["families"]
    found = {}
    for name, requests in families.items():
        if any(not 0 <= n < BLOCK_SIZE for request in requests for n in request):
            raise ValueError(f"{file}: {name} has an accept length outside 0..{BLOCK_SIZE - 1}")
        found[name] = recorded(
            [
                [Drafts(*one) for one in zip(lengths, confidences, strict=True)]
                for lengths, confidences in zip(requests, content["confidences"][name], strict=True)
            ]
        )
    return found


def workloads(traces: Path | None) -> list[Workload]:
    """All workloads; `traces` adds a recorded one, its families in turn."""
    falling = curve([0.88 - 0.03 * i for i in range(BLOCK_SIZE - 1)])
    cliff = curve([0.85] * 7 + [0.15] * 8)  # trained on blocks of 8, run at 16
    good, bad = geometric(0.85), geometric(0.2)
    found = [
        Workload("useless, a=0.05", ((geometric(0.05),),)),
        *(Workload(f"a={a}", ((geometric(a),),)) for a in (0.6, 0.7, 0.8, 0.9)),
        Workload("falling 0.88..0.46", ((falling,),)),
        Workload("cliff after 7 drafts", ((cliff,),)),
        Workload("families 0.6 and 0.9", ((geometric(0.6), geometric(0.9)),)),
        Workload("switches 0.85, 0.2, 0.85", ((good,), (bad,), (good,))),
    ]
    if traces is not None:
        found.append(Workload("recorded", (tuple(load_recorded(traces).values()),)))
    return found


def trace(workload: Workload, batch_size: int, steps: int, seed: int) -> Iterator[Step]:
    """The steps of a batch that is always full: an ended request is replaced at once.

    Args:
        workload: what comes in.
        batch_size: running requests.
        steps: length of the trace, over all segments.
        seed: the same arguments give the same trace.
    """
    rng, numbers = Random(f"{seed} {workload.name} {batch_size}"), count()
    keys, left = [0] * batch_size, [list[Drafts]()] * batch_size
    length = steps // len(workload.segments)
    for segment, families in enumerate(workload.segments):
        if segment > 0:  # running requests go on with other drafts
            left = [families[key % len(families)](rng) for key in keys]
        for n in range(length):
            for row in range(batch_size):
                if not left[row]:
                    keys[row] = next(numbers)
                    left[row] = families[keys[row] % len(families)](rng)
                    if segment == n == 0:  # the first ones are at any point of their life
                        del left[row][: rng.randrange(len(left[row]))]
            yield Step(list(keys), [drafts.pop() for drafts in left], segment)
