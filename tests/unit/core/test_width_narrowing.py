"""Narrowing a single request's verify: the tables, what is learned, what the policy makes of it.

The device's decision is the reference of the op that makes it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from math import inf

import pytest
import torch
from dflash_kernels.verify_bound import CLASSES, verify_bound

from dflash_sglang.core.width import CostTable, ObservedStep, WidthPolicy, WidthSettings
from dflash_sglang.core.width.narrowing import Bound, BoundTables

BLOCK = 16
SURE, DOUBTFUL = 0.9995, 0.5  # probabilities, in the middle of their classes
WIDTHS = (1, 2, 4, 8, 12, 16)


def verify_seconds(verified: int) -> float:
    """Of a whole verify and of one that is bounded alike."""
    return 1.0 + 0.3 * verified


def costs(*, narrows: bool = True) -> CostTable:
    bounded = {(n, w): verify_seconds(n) for w in WIDTHS[1:] for n in {*WIDTHS, w} if n <= w}
    return CostTable(
        {(batch, w): 0.3 for w in WIDTHS if w > 1 for batch in (1, 8)},
        {(batch, w): verify_seconds(w) for w in WIDTHS for batch in (1, 8)},
        bounded=bounded if narrows else None,
    )


def new_policy(*, narrows: bool = True) -> WidthPolicy:
    return WidthPolicy(BLOCK, costs(narrows=narrows), WidthSettings(widths=WIDTHS))


def decide(tables: BoundTables, probabilities: Sequence[float]) -> Bound:
    """As the device does."""
    out = verify_bound(
        torch.tensor([math.log(one) for one in probabilities]),
        torch.zeros(len(probabilities)),
        torch.tensor(tables.acceptance),
        torch.tensor(tables.prices),
    ).tolist()
    return Bound(out[0], out[2:])


class Server:
    """One request whose drafter knows how good each of its drafts is."""

    def __init__(self, *, narrows: bool = True, seed: int = 0, late: int = 0) -> None:
        self.policy, self.rng = new_policy(narrows=narrows), random.Random(seed)
        self.tokens = self.seconds = 0.0
        self.verified: list[int] = []
        self.late, self.waiting = late, list[ObservedStep]()

    def run(self, steps: int, doubtful: float) -> None:
        """Serve; a draft is doubtful with that probability and then wrong half of the time."""
        for _ in range(steps):
            width = self.policy.choose(["r"])
            drafts = [DOUBTFUL if self.rng.random() < doubtful else SURE for _ in range(width - 1)]
            tables = self.policy.bound_tables("r", width)
            bound = None if tables is None else decide(tables, drafts)
            verified = width if bound is None else bound.verified
            n = 0
            while n < verified - 1 and self.rng.random() < drafts[n]:
                n += 1
            seconds = verify_seconds(verified) + (0.3 if width > 1 else 0.0)
            self.waiting.append(ObservedStep(["r"], [n], width, seconds, bound=bound))
            while len(self.waiting) > self.late:
                self.policy.observe(self.waiting.pop(0))
            self.tokens, self.seconds = self.tokens + n + 1, self.seconds + seconds
            self.verified.append(verified)


def warm() -> WidthPolicy:
    server = Server()
    server.run(300, doubtful=0.0)
    assert server.policy.choose(["r"]) == BLOCK
    return server.policy


def bound_of(policy: WidthPolicy, probabilities: Sequence[float]) -> int:
    tables = policy.bound_tables("r", BLOCK)
    assert tables is not None
    return decide(tables, probabilities).verified


def test_sure_drafts_are_all_verified() -> None:
    assert bound_of(warm(), [SURE] * 15) == 16


@pytest.mark.parametrize("first_doubt", [0, 1, 3, 5, 8, 12])
def test_a_verify_ends_where_doubt_begins(first_doubt: int) -> None:
    drafts = [SURE] * first_doubt + [0.1] * (15 - first_doubt)
    assert bound_of(warm(), drafts) == 1 + first_doubt


def test_a_request_is_never_verified_past_what_it_may_commit() -> None:
    limited = warm()
    limited.limit("r", 4)
    assert bound_of(limited, [SURE] * 15) == 4
    tables = limited.bound_tables("r", BLOCK)
    assert tables is not None
    assert tables.prices[3] < tables.prices[4] == inf


@pytest.mark.parametrize("late", [0, 1])
def test_narrowing_is_faster_where_probabilities_differ(late: int) -> None:
    # Half of the doubtful drafts are wrong; a step meets its first one early or late.
    whole, narrowing = Server(narrows=False), Server(late=late)
    for server in (whole, narrowing):
        server.run(3000, doubtful=0.15)
    assert narrowing.tokens / narrowing.seconds > 1.05 * whole.tokens / whole.seconds


def test_drafts_that_were_not_verified_for_doubt_do_not_look_good() -> None:
    # Shown drafts alone would say that a draft is nearly always right.
    server = Server()
    server.run(3000, doubtful=0.15)
    assert sum(width < 16 for width in server.verified) > 1000
    right = 1 - 0.15 * 0.5
    truth = sum(right**n for n in range(BLOCK))
    acceptance = server.policy._acceptance
    expected = acceptance.expected_commit(acceptance.groups(["r"]), BLOCK)
    # About 90 steps are remembered, of an accept length that spreads as much as its mean.
    assert expected == pytest.approx(truth, rel=0.2)


def test_what_a_probability_is_worth_is_learned() -> None:
    """An overconfident drafter: half of what it is sure of is wrong."""
    policy = new_policy()
    rng = random.Random(0)
    for _ in range(500):
        policy.choose(["r"])
        accept_len = next((n for n in range(15) if rng.random() < 0.5), 15)
        policy.observe(
            ObservedStep(["r"], [accept_len], 16, None, bound=Bound(16, [CLASSES - 1] * 15))
        )
    tables = policy.bound_tables("r", BLOCK)
    assert tables is not None
    # About 180 drafts are remembered: 4 % standard error.
    assert tables.acceptance[-1] == pytest.approx(0.5, abs=0.15)
    assert tables.acceptance[1] == pytest.approx(0.3)  # of .2 to .4: no evidence, so the prior


def test_a_probe_is_verified_whole() -> None:
    server = Server()
    server.run(500, doubtful=1.0)
    for _ in range(2000):
        width = server.policy.choose(["r"])
        if width > 2:  # nothing but a probe drafts so much here
            tables = server.policy.bound_tables("r", width)
            assert tables is not None
            assert decide(tables, [0.01] * (width - 1)).verified == width
            return
        server.policy.observe(ObservedStep(["r"], [0], 1, verify_seconds(1)))
    raise AssertionError("no probe")


def test_a_narrowed_step_teaches_the_cost_of_a_whole_one() -> None:
    """Else every narrow verify would make its width look cheap."""
    table = costs()
    policy = WidthPolicy(BLOCK, table, WidthSettings(widths=WIDTHS))
    overhead = 0.5
    for _ in range(40):
        policy.choose(["r"])
        seconds = verify_seconds(4) + 0.3 + overhead
        policy.observe(ObservedStep(["r"], [0], 16, seconds, bound=Bound(4, [5] * 15)))
    assert table.seconds(1, 16) == pytest.approx(verify_seconds(16) + 0.3 + overhead)


def test_a_verify_that_saves_nothing_is_not_narrowed() -> None:
    """A runner that computes masked rows all the same: the measured prices are flat."""
    flat = CostTable(
        {(1, w): 0.3 for w in WIDTHS if w > 1},
        {(1, w): verify_seconds(w) for w in WIDTHS},
        bounded={(n, w): verify_seconds(w) for w in WIDTHS[1:] for n in WIDTHS if n <= w},
    )
    policy = WidthPolicy(BLOCK, flat, WidthSettings(widths=WIDTHS))
    policy.choose(["r"])
    assert bound_of(policy, [0.01] * 15) == 16


def test_several_requests_are_not_narrowed() -> None:
    policy = warm()
    before = policy.choose(["r"])
    several = [f"r{i}" for i in range(8)]
    policy.choose(several)
    policy.observe(ObservedStep(several, [3] * 8, 16, verify_seconds(16)))
    assert policy.choose(["r"]) == before


def test_width_1_and_servers_that_measured_no_bound_have_no_tables() -> None:
    assert warm().bound_tables("r", 1) is None
    dense = new_policy(narrows=False)
    dense.choose(["r"])
    assert dense.bound_tables("r", BLOCK) is None
