"""What the policy learns of a step: its own duration, its own accepted drafts, in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dflash_kernels.verify_bound import CLASSES

from dflash_sglang.core.width import (
    Bound,
    BoundTables,
    CostTable,
    ObservedStep,
    WidthPolicy,
    WidthSettings,
)
from dflash_sglang.step import width_control
from dflash_sglang.step.draft.narrowing import VerifyBound
from dflash_sglang.step.width_control import WidthController

BLOCK = 16
FORWARD_SECONDS = 0.012


class Recorder(WidthPolicy):
    """A policy with scripted choices that records what it observes."""

    def __init__(self, *_: Any) -> None:
        self.next: list[int] = []
        self.observed: list[ObservedStep] = []
        self.limits: dict[Any, int] = {}
        self.forgotten: list[Any] = []
        self.tables = BoundTables([0.5] * CLASSES, [0.0] * BLOCK)

    def choose(self, keys: Sequence[Any]) -> int:
        return self.next.pop(0)

    def observe(self, step: ObservedStep) -> None:
        self.observed.append(step)

    def limit(self, key: Any, max_width: int) -> None:
        self.limits[key] = max_width

    def bound_tables(self, key: Any, width: int) -> BoundTables | None:
        return None if width == 1 else self.tables._replace(prices=self.tables.prices[:width])

    def forget(self, key: Any) -> None:
        self.forgotten.append(key)


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        return self.now

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class Unread(list[int | None]):
    """Limits that know whether they were read."""

    read = False

    def __iter__(self) -> Iterator[int | None]:
        self.read = True
        return super().__iter__()


class Driver:
    """Runs steps of a controller as the worker does."""

    def __init__(self, controller: WidthController) -> None:
        self.controller = controller
        self.clock = Clock()
        controller._clock = self.clock  # type: ignore[assignment]

    def start(self, *choices: int) -> Recorder:
        """Hand over measured costs; the policy then makes these choices."""
        ladder = self.controller.ladder
        draft = {(1, width): FORWARD_SECONDS for width in ladder[1:]}
        verify = {(1, width): FORWARD_SECONDS for width in ladder}
        self.controller.start(CostTable(draft, verify))
        policy = self.controller._policy
        assert isinstance(policy, Recorder)
        policy.next = list(choices)
        return policy

    def step(
        self,
        begin: float,
        end: float | None,
        *rids: str,
        limits: Sequence[int | None] | None = None,
        forwards: int = 1,
    ) -> int:
        """One decode step; without an end its forwards fail."""
        self.clock.now = begin
        step = self.controller.begin(list(rids))
        self.controller.learn()
        width = self.controller.choose(step, limits or [None] * len(rids))
        if end is not None:
            self.clock.now = end
            self.controller.end(step, forwards)
        return width


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    group = SimpleNamespace(tp_group=SimpleNamespace(world_size=1))
    monkeypatch.setattr(width_control, "get_parallel", lambda: group)
    monkeypatch.setattr(width_control, "WidthPolicy", Recorder)
    return Driver(WidthController(BLOCK, WidthSettings(), "cpu"))


def test_before_the_costs_are_known_the_block_is_verified_whole(driver: Driver) -> None:
    assert driver.step(0.0, 0.5, "a") == BLOCK
    assert driver.controller.forwards_by_width()["16"] == 1


def test_a_step_has_its_own_time_and_drafts_under_overlap(driver: Driver) -> None:
    policy = driver.start(4, 8, 2, 2)
    driver.step(0.0, 0.8, "a", "b")
    driver.step(1.0, 3.0, "a", "b")  # launched before the outcome of the first has arrived
    driver.controller.report_acceptance([3, 0])
    driver.step(3.5, 3.9, "b")
    driver.controller.report_acceptance([7, 1])
    driver.step(4.0, 4.1, "b")
    assert policy.observed == [
        ObservedStep(["a", "b"], [3, 0], 4, 1.0),
        ObservedStep(["a", "b"], [7, 1], 8, 2.5),
    ]


def test_a_step_is_learned_when_the_next_begins_without_overlap(driver: Driver) -> None:
    policy = driver.start(4, 8)
    driver.step(0.0, 0.4, "a")
    driver.controller.report_acceptance([2])
    assert policy.observed == []
    driver.step(0.5, 0.7, "a")
    assert policy.observed == [ObservedStep(["a"], [2], 4, 0.5)]


def test_a_prefill_in_between_does_not_count(driver: Driver) -> None:
    # The usual gap between a step's forwards and the next step takes its place.
    policy = driver.start(*[4] * 5)
    for n in range(4):
        driver.step(n, n + 0.75, "a")
        driver.controller.report_acceptance([2])
    driver.controller.interrupt()
    driver.step(9.0, 9.5, "a")
    assert [step.seconds for step in policy.observed] == [1.0] * 4


def test_a_step_that_never_ended_has_no_duration(driver: Driver) -> None:
    policy = driver.start(4, 4)
    driver.step(0.0, None, "a")
    driver.controller.report_acceptance([2])
    driver.step(1.0, 1.5, "a")
    assert policy.observed[0].seconds is None


def test_a_request_is_limited_once_and_forgotten(driver: Driver) -> None:
    policy = driver.start(4, 4, 4)
    driver.step(0.0, 0.5, "a", "b", limits=[3, None])
    assert policy.limits == {"a": 3}
    policy.limits.clear()
    driver.step(1.0, 1.5, "a", "b", limits=[3, None])
    assert policy.limits == {}
    driver.step(2.0, 2.5, "a", "b", limits=[1, None])  # past the drafter's range, say
    assert policy.limits == {"a": 1}
    driver.controller.forget("a")
    assert policy.forgotten == ["a"]


def test_a_request_without_a_limit_does_not_get_that_of_another_with_its_id(
    driver: Driver,
) -> None:
    """The other was aborted while it waited, which is not reported."""
    policy = driver.start(4, 4)
    driver.step(0.0, 0.5, "a", limits=[1])
    driver.step(1.0, 1.5, "a", limits=[None])
    assert policy.limits == {"a": BLOCK}


def test_limits_that_have_not_changed_are_not_looked_at(driver: Driver) -> None:
    policy = driver.start(4, 4)
    limits = Unread([3])
    driver.step(0.0, 0.5, "a", limits=limits)
    limits.read = False
    driver.step(1.0, 1.5, "a", limits=limits)
    assert not limits.read
    assert policy.limits == {"a": 3}


def test_multi_step_decoding_is_one_step_of_many_forwards(driver: Driver) -> None:
    policy = driver.start(1, 1)
    driver.step(0.0, 0.9, "a", forwards=5)
    driver.controller.report_acceptance([0])
    driver.step(1.0, 1.1, "a")
    assert policy.observed == [ObservedStep(["a"], [0], 1, 1.0, forwards=5)]
    assert driver.controller.forwards_by_width()["1"] == 6


def test_costs_are_unknown_until_they_are_measured(driver: Driver) -> None:
    assert driver.controller.seconds(1, 1) is None
    driver.start()
    assert driver.controller.seconds(1, 1) == FORWARD_SECONDS


def test_costs_are_those_behind_the_context_of_the_batch(driver: Driver) -> None:
    verify = {(1, width): FORWARD_SECONDS for width in driver.controller.ladder}
    draft = dict.fromkeys([cell for cell in verify if cell[1] > 1], 0.0)
    per_token = dict.fromkeys(verify, 1e-6)
    driver.controller.start(CostTable(draft, verify, verify_per_token=per_token, context=64))
    driver.controller.begin(["a"], 10_064.0)
    assert driver.controller.seconds(1, 4) == pytest.approx(FORWARD_SECONDS + 0.01)
    driver.controller.begin(["a"], 64.0)
    assert driver.controller.seconds(1, 4) == FORWARD_SECONDS


# ---- a single request's bound --------------------------------------------------------------------


@pytest.fixture
def bound() -> VerifyBound:
    return VerifyBound([width for width in WidthSettings().ladder(BLOCK) if width > 1], "cpu")


@pytest.fixture
def bounded(driver: Driver, bound: VerifyBound) -> Driver:
    return Driver(WidthController(BLOCK, WidthSettings(), "cpu", bound))


def decide(bound: VerifyBound, *probabilities: float) -> None:
    """What a draft's graph does."""
    bound.decide(torch.tensor(probabilities).log(), torch.zeros(len(probabilities)))


def test_a_single_request_is_learned_from_with_what_its_drafts_decided(
    bounded: Driver, bound: VerifyBound
) -> None:
    policy = bounded.start(4, 4, 4)
    policy.tables = BoundTables([0.0] * (CLASSES - 1) + [1.0], [0.0, 0.5, 1.0, 1.5])
    for probabilities in ((0.9999, 0.5, 0.5), (0.5, 0.5, 0.5), (0.9999,) * 3):
        bounded.clock.now += 1.0
        step = bounded.controller.begin(["a"])
        bounded.controller.learn()
        bounded.controller.choose(step, [None])
        decide(bound, *probabilities)
        bounded.controller.end(step, 1)
    for accept_len in (1, 0, 3):
        bounded.controller.report_acceptance([accept_len])
    bounded.controller.learn()
    decided = [step.bound for step in policy.observed]
    assert [one.verified for one in decided if one is not None] == [2, 1, 4]
    assert decided[0] == Bound(2, [CLASSES - 1, 2, 2])
    assert bounded.controller.narrowed() == {"steps": 3, "drafted": 12, "verified": 7}


@pytest.mark.parametrize(("rids", "width"), [(["a", "b"], 4), (["a"], 1)])
def test_batches_and_plain_tokens_decide_nothing(
    bounded: Driver, rids: list[str], width: int
) -> None:
    policy = bounded.start(width, 4)
    bounded.step(0.0, 0.5, *rids)
    bounded.controller.report_acceptance([0] * len(rids))
    bounded.step(1.0, 1.5, "c")
    assert policy.observed[0].bound is None


def test_ranks_agree_on_width_and_tables_in_one_broadcast(
    bounded: Driver, bound: VerifyBound, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that judged drafts by their own times would accept different drafts."""
    rank_0 = [8.0, 6.0, *[0.25] * CLASSES, *(0.1 * n for n in range(8))]
    sent = []

    def broadcast(tensor: torch.Tensor, src: int, group: object) -> None:
        sent.append(tensor.clone())
        tensor.zero_()
        tensor[: len(rank_0)] = torch.tensor(rank_0, dtype=tensor.dtype)

    monkeypatch.setattr(torch.distributed, "broadcast", broadcast)
    bounded.controller._tp_group = SimpleNamespace(world_size=2, ranks=[0, 1], cpu_group=None)
    policy = bounded.start(4)
    policy.tables = BoundTables([0.5] * CLASSES, [0.0, 1.0, 2.0, 3.0])
    assert bounded.step(0.0, 0.5, "a") == 8
    assert len(sent) == 1
    assert sent[0][0] == 4
    assert bound._tables[8].tolist() == pytest.approx(rank_0[2:])
    assert not bound._tables[4][CLASSES:].any()  # this rank's own choice
