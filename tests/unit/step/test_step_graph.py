"""The decode step on a fake GPU: it never waits, keeps its buffers, and stays within its budget.

The worker's own code runs (see bench/harness/fake_gpu); each planted fault changes one part of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from dflash_kernels.types import Acceptance
from torch import Tensor

from bench.harness.fake_gpu.capture_guard import CaptureError, CaptureGuard, check_step
from bench.harness.fake_gpu.fakes import FakeServer, fake_gpu
from bench.harness.fake_gpu.traffic import BLOCK, Traffic, make_batch, new
from bench.step import launches as step_launches
from bench.step.launches import BUDGET, OurStep
from dflash_sglang.step import accept
from dflash_sglang.step.batch_facts import CommitLimits
from dflash_sglang.step.context_kv import ContextKV
from dflash_sglang.step.draft.drafter import Drafter
from dflash_sglang.step.draft.narrowing import VerifyBound
from dflash_sglang.step.draft.tail import DraftTail
from dflash_sglang.step.verifier_sampling import VerifierSampler

GREEDY, SAMPLED = Traffic(1, sampled=False), Traffic(1, sampled=True)


@pytest.fixture
def step() -> Iterator[OurStep]:
    with fake_gpu():
        yield OurStep(FakeServer())


@pytest.fixture
def bounded_step() -> Iterator[OurStep]:
    """Of a server whose drafts bound the verify of a single request."""
    with fake_gpu():
        yield OurStep(FakeServer(), narrows=True)


def check(step: OurStep, traffic: Traffic) -> list[str]:
    """Ops of the step; the same at every batch size, without a wait."""

    def second_step(batch: int) -> CaptureGuard:
        # The first one writes what the requests before have left waiting.
        step.run(traffic._replace(batch=batch))
        return step.run(traffic._replace(batch=batch))

    return check_step(second_step, step.statics)


@pytest.mark.parametrize("width", [BLOCK, BLOCK // 2, 1])
@pytest.mark.parametrize("requests", BUDGET)
def test_a_step_never_waits_and_stays_within_its_budget(
    step: OurStep, requests: str, width: int
) -> None:
    ops = check(step, Traffic(1, sampled=requests == "sampled", width=width))
    assert len(ops) <= BUDGET[requests]


def test_a_bounded_step_never_waits_between_draft_and_verify(bounded_step: OurStep) -> None:
    """The bound goes from the draft's graph to the verify and to the accept rule, on the device."""
    before = len(check(bounded_step, GREEDY))
    assert before <= BUDGET["greedy"]
    alone, batch = (bounded_step.run(GREEDY._replace(batch=n)) for n in (1, 4))
    assert "dflash::verify_bound" in alone.ops("draft graph")
    assert "dflash::verify_bound" not in batch.ops("draft graph")


def read_after_draft(right: Callable[..., Any], *args: Any, **options: Any) -> Any:
    draft = right(*args, **options)
    if draft.limit is not None:
        int(draft.limit)
    return draft


def test_a_host_read_of_the_bound_is_caught(
    bounded_step: OurStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Drafter, "propose", instead(read_after_draft)(Drafter.propose))
    with pytest.raises(CaptureError, match="reads the device"):
        check(bounded_step, GREEDY)


def test_a_bound_in_a_new_buffer_is_caught(
    bounded_step: OurStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured graphs know the old one."""

    def decide(bound: VerifyBound, values: Tensor, lse: Tensor) -> None:
        bound._result = new(BLOCK + 1, dtype=torch.int32)

    monkeypatch.setattr(VerifyBound, "decide", decide)
    with pytest.raises(CaptureError, match="the bound is another"):
        check(bounded_step, GREEDY)


def test_the_whole_step_is_seen(step: OurStep) -> None:
    """A harness that runs nothing would pass every other test."""
    guard = step.run(GREEDY)
    ours = [op for op in guard.ops("step") if op.startswith("dflash::")]
    assert ours == ["dflash::prepare_block", "dflash::accept_match", "dflash::context_kv"]
    assert "dflash::draft_tail" in guard.ops("draft graph")
    assert guard.ops("scheduler") == ["aten::index_put_"]
    assert "dflash::accept_sampled" in step.run(SAMPLED).ops("step")


def test_one_op_draws_filtered_requests_but_those_with_all_filters(
    step: OurStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one of them takes its whole batch along."""
    drawn = []

    def choose(sampler: VerifierSampler, logits: Tensor, batch: Any, positions: Tensor) -> Tensor:
        drawn.append(len(batch.reqs))
        return new(*positions.shape)

    monkeypatch.setattr(VerifierSampler, "choose", choose)

    def filtering(*args: Any, **filters: Any) -> Any:
        batch = make_batch(*args)
        info, params = batch.sampling_info, batch.reqs[-1].sampling_params
        info.need_top_k_sampling = info.need_top_p_sampling = info.need_min_p_sampling = True
        params.top_p = 0.9
        for name, value in filters.items():
            setattr(params, name, value)
        return batch

    monkeypatch.setattr(step_launches, "make_batch", filtering)
    ops = check(step, SAMPLED)
    assert "dflash::accept_filtered" in ops
    assert len(ops) <= BUDGET["sampled"]
    assert drawn == []
    all_three = functools.partial(filtering, top_k=20, min_p=0.1)
    monkeypatch.setattr(step_launches, "make_batch", all_three)
    step.run(SAMPLED._replace(batch=4))
    assert drawn == [4]


def test_tokens_of_requests_that_left_do_not_wait_for_those_that_go_on(step: OurStep) -> None:
    """They may get the same slots: one launch must not write both."""

    def writes(batch: int) -> int:
        guard = step.run(Traffic(batch, sampled=False, width=1))
        return guard.ops("step").count("dflash::context_kv")

    assert [writes(batch) for batch in (2, 2, 1, 1)] == [0, 0, 1, 0]


# ---- planted faults ----------------------------------------------------------------------------

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def after(fault: Callable[[Any], Any]) -> Wrap:
    """The function as it is, and then the fault on what it returns."""

    def wrap(right: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(*args: Any, **options: Any) -> Any:
            result = right(*args, **options)
            fault(result)
            return result

        return wrong

    return wrap


def branch_on_acceptance(accepted: Acceptance) -> None:
    if (accepted.accept_len == BLOCK - 1).all():
        accepted.commit_len.clone()


def instead(fault: Callable[..., Any]) -> Wrap:
    """The fault, which is also given the function as it is."""

    def wrap(right: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(*args: Any, **options: Any) -> Any:
            return fault(right, *args, **options)

        return wrong

    return wrap


def only_accepted(
    right: Callable[..., None], self: ContextKV, features: Tensor, slots: Tensor, positions: Tensor
) -> None:
    chosen = slots >= 0
    right(self, features[chosen], slots[chosen], positions[chosen])


def pageable_limits(right: Any, self: CommitLimits, batch: Any, limits: Any) -> Tensor:
    return torch.tensor([15] * len(batch.reqs), dtype=torch.int32, device="cuda")


def host_number(right: Any, self: CommitLimits, batch: Any, limits: Any) -> None:
    torch.tensor(len(batch.reqs), device="cuda")


def host_index(right: Any, self: CommitLimits, batch: Any, limits: Any) -> None:
    batch.seq_lens[torch.arange(len(batch.reqs))]


def new_candidates(
    right: Any, self: DraftTail, hidden: Tensor, input_ids: Tensor | None = None
) -> None:
    found = self.top(hidden)
    self.buffers = found.ids, found.logits


def new_cache(right: Callable[..., None], self: ContextKV, *chunk: Tensor) -> None:
    right(self, *chunk)
    pool = self._runner.token_to_kv_pool
    pool.k_buffer = [keys.clone() for keys in pool.k_buffer]


def more_for_one(right: Callable[..., Any], self: Drafter, ids: Tensor) -> Any:
    return right(self, ids.clone() if len(ids) == 1 else ids)


def repeated_by_lengths(accepted: Acceptance) -> None:
    accepted.bonus_ids.repeat_interleave(accepted.commit_len)


FAULTS = {
    "the longest accepted run is read": (
        accept, "accept_match", after(lambda got: int(got.accept_len.max())), "reads"
    ),
    "a branch on what was accepted": (
        accept, "accept_match", after(branch_on_acceptance), "reads"
    ),
    "accepted tokens go to the host": (
        accept, "accept_match", after(lambda got: got.output_ids.cpu()), "host and device"
    ),
    "the bonus as a list": (
        accept, "accept_match", after(lambda got: got.bonus_ids.tolist()), "reads"
    ),
    "rows of every accepted token": (
        accept, "accept_match", after(repeated_by_lengths), "reads"
    ),
    "the rejected are looked for": (
        accept, "accept_match", after(lambda got: got.accept_len.nonzero()), "reads"
    ),
    "only accepted tokens are written": (
        ContextKV, "_write", instead(only_accepted), "depends on data"
    ),
    "limits from pageable memory": (
        CommitLimits, "on_device", instead(pageable_limits), "host and device"
    ),
    "a number from the host": (CommitLimits, "on_device", instead(host_number), "host and device"),
    "an index on the host": (CommitLimits, "on_device", instead(host_index), "host and device"),
    "new candidates at every replay": (
        DraftTail, "__call__", instead(new_candidates), "candidates' ids at width 16 is another"
    ),
    "a new cache": (ContextKV, "_write", instead(new_cache), "keys of layer 0 is another"),
    "one request is embedded otherwise": (
        Drafter, "_embed", instead(more_for_one), "other ops at batch"
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(
    fault: str, step: OurStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, wrap, message = FAULTS[fault]
    monkeypatch.setattr(owner, name, wrap(getattr(owner, name)))
    with pytest.raises(CaptureError, match=message):
        check(step, GREEDY)


def test_layers_written_one_by_one_exceed_the_budget(step: OurStep) -> None:
    step.worker._context_kv._one_by_one = True
    assert len(check(step, GREEDY)) > BUDGET["greedy"]
