"""What is measured at start: batches and contexts that the pools hold, timed as steps follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from dflash_sglang.core.width import CostTable
from dflash_sglang.step.setup import calibration as module
from dflash_sglang.step.setup.calibration import CONTEXT, LONG_CONTEXT, REPEATS, Calibration

BLOCK = 16
ROWS = 8  # requests that the table of slots holds, behind the padding row
TOKENS = 40_000
PAGE = 4
LADDER = (1, 4, 16)


class Forward(NamedTuple):
    """One forward over a dummy batch."""

    role: str
    batch_size: int
    width: int
    context: int
    rows: torch.Tensor  # slots of the requests


class Clock:
    """Forwards take a second for each request, and one more for each 1,000 tokens of context."""

    now = 0.0

    def mark(self) -> float:
        return self.now

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class Machine:
    """Runners of verifier and drafter whose forwards are written down."""

    def __init__(self, *, context_len: int = 65_536, tokens: int = TOKENS) -> None:
        self.forwards: list[Forward] = []
        self.active: list[int] = []
        self.clock = Clock()
        self.table = torch.zeros(1 + ROWS, context_len + 64, dtype=torch.int32)
        self.runner: Any = SimpleNamespace(
            device="cpu",
            model_config=SimpleNamespace(context_len=context_len, vocab_size=100),
            max_total_num_tokens=tokens,
            req_to_token_pool=SimpleNamespace(req_to_token=self.table),
            token_to_kv_pool_allocator=SimpleNamespace(page_size=PAGE),
            kv_index_translator=SimpleNamespace(is_translating=False, plan=lambda **_: None),
        )
        self.drafter: Any = SimpleNamespace(
            candidates=lambda batch, block, plan: self.run("draft", batch, block)
        )
        self.runners: Any = SimpleNamespace(
            activate=self.active.append, restore=lambda: self.active.append(0)
        )

    def run(self, role: str, batch: Any, block: Any) -> None:
        batch_size, width = block.ids.shape
        context = int(batch.seq_lens_cpu[0])
        assert batch.req_pool_indices.tolist() == list(range(1, batch_size + 1))
        assert batch.seq_lens_cpu.tolist() == [context] * batch_size
        assert block.positions[0].tolist() == list(range(context, context + width))
        assert not block.slots.any()  # the padding slot
        rows = self.table[1 : batch_size + 1, :context].clone()
        self.forwards.append(Forward(role, batch_size, width, context, rows))
        self.clock.now += batch_size * (1 + context / 1000)

    def calibration(self, draft_range: int | None = None) -> Calibration:
        made = Calibration(self.runner, self.drafter, self.runners, BLOCK, draft_range)
        made._clock = self.clock  # type: ignore[assignment]
        made._verify = lambda batch, block, plan: self.run(  # type: ignore[method-assign]
            "verify", batch, block
        )
        return made

    def measured(self, context: Callable[[int], bool] = lambda _: True) -> set[tuple[int, int]]:
        found = [one for one in self.forwards if context(one.context)]
        return {(one.batch_size, one.width) for one in found}


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)


@pytest.mark.parametrize("held", [1, 3, 4, 8])
def test_no_batch_above_what_the_pools_hold(held: int) -> None:
    """A batch above them dies at start, or writes past the end of a buffer."""
    machine = Machine()
    machine.calibration().measure(LADDER, held)
    assert max(one.batch_size for one in machine.forwards) == held
    assert {one.batch_size for one in machine.forwards} == {n for n in (1, 4) if n < held} | {held}


def test_a_width_is_measured_where_it_has_graphs() -> None:
    machine = Machine()
    machine.calibration().measure((1, 4, 8, 16), 8, {4: 3, 8: 0})
    of = {width: {b for b, w in machine.measured() if w == width} for width in (1, 4, 8, 16)}
    assert of == {1: {1, 3, 4, 8}, 4: {1, 3}, 8: set(), 16: {1, 3, 4, 8}}


def test_two_contexts_that_models_and_pool_hold() -> None:
    machine = Machine()
    machine.calibration().measure(LADDER, 8)
    contexts = {(one.batch_size, one.context) for one in machine.forwards}
    assert contexts == {(b, CONTEXT) for b in (1, 4, 8)} | {(1, LONG_CONTEXT), (8, TOKENS // 8)}


@pytest.mark.parametrize(
    ("machine", "draft_range", "longest"),
    [
        (Machine(context_len=4096), None, 4096 - 2 * BLOCK),
        (Machine(), 2048, 2048 - 2 * BLOCK),  # past them the drafter has no positions
        (Machine(tokens=1001), None, 1000),  # whole pages
        (Machine(tokens=100), None, CONTEXT),  # nothing is to be seen
    ],
    ids=["context", "drafter", "pool", "tiny pool"],
)
def test_the_long_context_is_as_long_as_there_is(
    machine: Machine, draft_range: int | None, longest: int
) -> None:
    machine.calibration(draft_range).measure(LADDER, 1)
    assert max(one.context for one in machine.forwards) == longest


def test_costs_follow_batch_and_context() -> None:
    machine = Machine()
    costs = machine.calibration().measure(LADDER, 8)
    for batch_size in (1, 3, 8):
        for context in (CONTEXT, 1000, 5000):
            costs.at(context)
            forward = batch_size * (1 + context / 1000)
            assert costs.verify_seconds(batch_size, 4) == pytest.approx(forward)
            assert costs.seconds(batch_size, 16) == pytest.approx(2 * forward)
            assert costs.seconds(batch_size, 1) == pytest.approx(forward)


def test_a_pool_that_is_too_small_for_two_contexts_leaves_costs_as_measured() -> None:
    costs = Machine(tokens=100).calibration().measure(LADDER, 8)
    before = costs.seconds(8, 16)
    costs.at(100_000)
    assert costs.seconds(8, 16) == before


def test_requests_read_slots_of_their_own_and_leave_none_behind() -> None:
    """Read from one slot, a long context would come out of a cache."""
    machine = Machine()
    machine.calibration().measure((16,), 8)
    for one in machine.forwards:
        slots = one.rows.flatten()
        assert len(slots.unique()) == len(slots)
        assert int(slots.min()) >= PAGE
        assert int(slots.max()) < TOKENS + PAGE
        assert (one.rows[:, 0] % PAGE == 0).all()  # a page is read as a whole
    assert not machine.table.any()


def test_virtual_slots_are_not_made_up() -> None:
    machine = Machine()
    machine.runner.kv_index_translator.is_translating = True
    machine.calibration().measure((16,), 8)
    assert not any(one.rows.any() for one in machine.forwards)


def test_draft_and_verify_take_turns_as_in_a_step() -> None:
    machine = Machine()
    machine.calibration().measure((16,), 1)
    roles = [one.role for one in machine.forwards if one.context == CONTEXT]
    assert roles == ["draft", "verify"] * (1 + REPEATS)
    assert machine.active == [16, 16, 0]


def test_the_host_is_ahead_of_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a small model's forwards are as slow as the host that launches them."""
    machine, events = Machine(), list[str]()
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: events.append("sleep"))
    device = SimpleNamespace(synchronize=lambda: events.append("wait"))
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    calibration = machine.calibration()
    calibration._device = "cuda"
    calibration._seconds([lambda: events.append("draft"), lambda: events.append("verify")])
    series = ["draft", "verify"]
    assert events == [*series, "wait", "sleep", *series * REPEATS, "wait"]


def test_a_slow_repeat_does_not_count() -> None:
    machine = Machine()
    took: Sequence[float] = [0.0, 9.0, 1.0, 1.0]
    places = iter(took)

    def run() -> None:
        machine.clock.now += next(places)

    assert machine.calibration()._seconds([run]) == [1.0]


def test_what_was_measured_is_a_cost_table() -> None:
    assert isinstance(Machine().calibration().measure((16,), 2), CostTable)
    assert module.BATCH_SIZES[0] == 1  # the smallest that is served
