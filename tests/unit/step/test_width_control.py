"""What the policy hears of a step: its own duration, its own accepted drafts, in order."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_sglang.core.width import CostTable, ObservedStep, WidthPolicy, WidthSettings
from dflash_sglang.step import multi_step as plain_run
from dflash_sglang.step import width_control as widths
from dflash_sglang.step.draft_limits import DraftLimits
from dflash_sglang.step.width_control import Widths

BLOCK = 16
PASS_SECONDS = 0.012


class Recorder(WidthPolicy):
    """A policy that does as it is told and remembers what it hears."""

    def __init__(self, *_: Any) -> None:
        self.next: list[int] = []
        self.heard: list[ObservedStep] = []
        self.limits: dict[Any, int] = {}
        self.forgotten: list[Any] = []
        self.narrower = 0
        self.asking = True

    def choose(self, keys: Sequence[Any]) -> int:
        return self.next.pop(0)

    def narrow(self, keys: Sequence[Any], width: int, confidences: Any) -> int:
        return self.narrower

    def asks(self, batch_size: int, width: int) -> bool:
        return self.asking

    def observe(self, step: ObservedStep) -> None:
        self.heard.append(step)

    def limit(self, key: Any, max_width: int) -> None:
        self.limits[key] = max_width

    def forget(self, key: Any) -> None:
        self.forgotten.append(key)


class Clock:
    """Marks are what the test says."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        return self.now

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


@pytest.fixture
def overlap(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    schedule = SimpleNamespace(disable_overlap_schedule=False)
    monkeypatch.setattr(plain_run, "get_schedule", lambda: schedule)
    features = SimpleNamespace(enable_return_routed_experts=False, enable_return_indexer_topk=False)
    monkeypatch.setattr(plain_run, "get_exec", lambda: SimpleNamespace(features=features))
    schedule.features = features
    return schedule


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch, overlap: SimpleNamespace) -> Widths:
    group = SimpleNamespace(tp_group=SimpleNamespace(world_size=1))
    monkeypatch.setattr(widths, "get_parallel", lambda: group)
    monkeypatch.setattr(widths, "WidthPolicy", Recorder)
    made = Widths(BLOCK, WidthSettings(), DraftLimits(BLOCK, 100, "cpu"), "cpu")
    made._clock = Clock()  # type: ignore[assignment]
    return made


def started(controller: Widths, *choices: int) -> Recorder:
    draft = {(1, width): PASS_SECONDS for width in controller.ladder[1:]}
    verify = {(1, width): PASS_SECONDS for width in controller.ladder}
    controller.start(CostTable(draft, verify))
    policy = controller._policy
    assert isinstance(policy, Recorder)
    policy.next = list(choices)
    return policy


def batch_of(*rids: str, **params: Any) -> Any:
    reqs = [
        SimpleNamespace(
            rid=rid,
            custom_logit_processor=None,
            origin_input_ids=[0] * 20,
            output_ids=[],
            sampling_params=SimpleNamespace(custom_params=params or None),
        )
        for rid in rids
    ]
    info = SimpleNamespace(has_custom_logit_processor=False)
    return SimpleNamespace(reqs=reqs, has_grammar=False, return_logprob=False, sampling_info=info)


def at(controller: Widths, now: float) -> Widths:
    controller._clock.now = now  # type: ignore[attr-defined]
    return controller


def step(controller: Widths, begin: float, done: float, *rids: str) -> None:
    at(controller, begin).choose(batch_of(*rids))
    at(controller, done).ran()


def test_before_the_costs_are_known_the_block_is_verified_whole(controller: Widths) -> None:
    assert controller.choose(batch_of("a")).width == BLOCK


def test_a_step_is_reported_with_its_own_time_and_drafts_under_overlap(controller: Widths) -> None:
    policy = started(controller, 4, 8, 2, 2)
    step(controller, 0.0, 0.8, "a", "b")
    step(controller, 1.0, 3.0, "a", "b")  # launched before the first is known
    controller.verified([3, 0])
    step(controller, 3.5, 3.9, "b")
    controller.verified([7, 1])
    step(controller, 4.0, 4.1, "b")
    assert policy.heard == [
        ObservedStep(["a", "b"], [3, 0], 4, 1.0),
        ObservedStep(["a", "b"], [7, 1], 8, 2.5),
    ]


def test_a_step_is_reported_when_the_next_begins_without_overlap(controller: Widths) -> None:
    policy = started(controller, 4, 8)
    step(controller, 0.0, 0.4, "a")
    controller.verified([2])
    assert policy.heard == []
    step(controller, 0.5, 0.7, "a")
    assert policy.heard == [ObservedStep(["a"], [2], 4, 0.5)]


def test_a_prefill_in_between_does_not_count(controller: Widths) -> None:
    # What usually lies between a step's passes and the next step takes its place.
    policy = started(controller, *[4] * 5)
    for n in range(4):
        step(controller, n, n + 0.75, "a")
        controller.verified([2])
    controller.disturb()
    step(controller, 9.0, 9.5, "a")
    assert [heard.seconds for heard in policy.heard] == [1.0] * 4


def test_a_step_that_never_ended_has_no_duration(controller: Widths) -> None:
    policy = started(controller, 4, 4)
    at(controller, 0.0).choose(batch_of("a"))
    controller.verified([2])
    step(controller, 1.0, 1.5, "a")
    assert policy.heard[0].seconds is None


def test_few_requests_ask_the_drafter_and_verify_less(controller: Widths) -> None:
    policy = started(controller, 8, 8)
    assert not at(controller, 0.0).choose(batch_of(*"abcde")).confident  # the default is up to 4
    controller.ran()
    controller.verified([1] * 5)
    assert at(controller, 1.0).choose(batch_of("a")).confident
    policy.narrower = 4
    assert controller.narrow(torch.full((1, 7), 0.5)) == 4
    controller.ran()
    controller.verified([2])
    policy.next = [1]
    assert not at(controller, 2.0).choose(batch_of("a")).confident  # nothing is drafted
    told = policy.heard[-1]
    assert (told.width, told.verified, told.confidences) == (8, 4, [[0.5] * 7])
    policy.next, policy.asking = [8], False
    assert not at(controller, 3.0).choose(batch_of("a")).confident  # not worth it
    assert controller.steps_by_width() == {"1": 1, "2": 0, "4": 1, "8": 2, "12": 0, "16": 0}


def test_a_request_is_limited_once_and_forgotten(controller: Widths) -> None:
    policy = started(controller, 4, 4)
    limited = batch_of("a", dflash={"max_width": 3})
    controller.choose(limited)
    policy.limits.clear()
    controller.choose(limited)
    assert policy.limits == {}
    controller.finished("a")
    assert policy.forgotten == ["a"]


def test_a_request_past_the_drafters_range_does_not_count_as_rejecting(controller: Widths) -> None:
    policy = started(controller, 4, 4)
    batch = batch_of("a")
    controller.choose(batch)
    assert policy.limits == {}
    batch.reqs[0].output_ids = [0] * 70  # a block would end past position 99
    controller.choose(batch)
    assert policy.limits == {"a": 1}


def test_width_one_runs_on_only_without_overlap(
    controller: Widths, overlap: SimpleNamespace
) -> None:
    started(controller, 1, 1, 1, 1, 4)
    assert controller.choose(batch_of("a")).passes == 1
    overlap.disable_overlap_schedule = True
    assert controller.choose(batch_of("a")).passes == int(plain_run.RUN_SECONDS / PASS_SECONDS) == 3
    held = batch_of("a")
    held.has_grammar = True
    assert controller.choose(held).passes == 1
    overlap.features.enable_return_routed_experts = True  # a pass's experts would be lost
    assert controller.choose(batch_of("a")).passes == 1
    overlap.features.enable_return_routed_experts = False
    assert controller.choose(batch_of("a")).passes == 1  # width 4


@pytest.mark.parametrize(
    ("pass_seconds", "block_size", "passes"),
    [(0.002, 16, 16), (0.002, 4, 4), (0.007, 16, 5), (1.0, 16, 1), (None, 16, 6), (None, 2, 2)],
)
def test_a_run_takes_no_longer_than_a_wide_verify(
    pass_seconds: float | None, block_size: int, passes: int
) -> None:
    """And no more slots than every step reserves: a block's."""
    assert plain_run.run_passes(pass_seconds, block_size) == passes


def test_a_run_is_reported_as_one_step_of_many_passes(
    controller: Widths, overlap: SimpleNamespace
) -> None:
    overlap.disable_overlap_schedule = True
    policy = started(controller, 1, 1)
    at(controller, 0.0).choose(batch_of("a"))
    at(controller, 0.9).ran(5)
    controller.verified([0])
    at(controller, 1.0).choose(batch_of("a"))
    assert policy.heard == [ObservedStep(["a"], [0], 1, 1.0, passes=5)]
    assert controller.steps_by_width()["1"] == 6
