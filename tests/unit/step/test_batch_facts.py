"""Facts of a batch are those of the requests that run now, and limits those of their lengths."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

from bench.harness.fake_gpu.on_host import FILTERS, device_is_host, make_batch, make_request
from dflash_sglang.step.batch_facts import BatchFacts, CommitLimits, RunningBatch, most_filters
from dflash_sglang.step.state import DraftState
from tests.support.requests import batch_of, request_with

BLOCK = 4


def facts_of(batch: Any) -> BatchFacts:
    """Found from nothing."""
    return RunningBatch(BLOCK, "cpu").facts(batch)


def with_options(**options: Any) -> dict[str, Any]:
    return {"custom_params": {"dflash": options}}


# ---- what is kept is what would be found -------------------------------------------------------

SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0, **with_options(max_width=2)},
    {"temperature": 0.0, **with_options(speculative=False)},
    FILTERS,
    {**FILTERS, "min_p": 0.1},
    {"temperature": 0.7, **with_options(max_width=3)},
]


def decoding(reqs: list[Req]) -> ScheduleBatch:
    none = torch.zeros(len(reqs), dtype=torch.int64)
    return make_batch(reqs, DraftState(none, none))


class Server:
    """SGLang's running batch, which requests join and leave."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.arrived = 0
        self.retracted: list[Req] = []
        self.batch = decoding([self.arrive(), self.arrive()])

    def arrive(self) -> Req:
        # Ids repeat: a client may use one again.
        self.arrived += 1
        return make_request(self.arrived % 5, **self.rng.choice(SAMPLING))

    def join(self) -> None:
        self.batch.merge_batch(decoding([self.arrive() for _ in range(self.rng.randint(1, 3))]))

    def return_retracted(self) -> None:
        if self.retracted:
            self.batch.merge_batch(decoding([self.retracted.pop()]))

    def leave(self) -> None:
        if len(self.batch.reqs) > 1:
            self._keep(self.rng.sample(range(len(self.batch.reqs)), len(self.batch.reqs) - 1))

    def retract(self) -> None:
        """As `retract_decode` ends: those that stay, most preferred first."""
        before = list(self.batch.reqs)
        self.leave()
        self.retracted += [req for req in before if req not in self.batch.reqs]

    def replace(self) -> None:
        """One leaves and another joins, so that there are as many as before."""
        if len(self.batch.reqs) > 1:
            self.leave()
            self.batch.merge_batch(decoding([self.arrive()]))

    def reorder(self) -> None:
        # No way of SGLang's to do so is known; a list changed in place is seen too.
        self.rng.shuffle(self.batch.reqs)

    def abort_all(self) -> None:
        self.batch = decoding([self.arrive()])

    def nothing(self) -> None:
        self.batch.filter_batch()

    def _keep(self, rows: list[int]) -> None:
        self.batch.filter_batch(keep_indices=rows)


EVENTS: list[Callable[[Server], None]] = [
    Server.join,
    Server.return_retracted,
    Server.leave,
    Server.retract,
    Server.replace,
    Server.reorder,
    Server.nothing,
    Server.nothing,
    Server.abort_all,
]


@pytest.fixture(scope="module", autouse=True)
def sglang() -> Iterator[None]:
    with device_is_host():
        yield


@pytest.mark.parametrize("seed", range(20))
def test_facts_are_never_those_of_requests_that_left(seed: int) -> None:
    """Joins, leaves, retractions and returns, replacements, reordering, aborts, repeated ids."""
    server, running = Server(seed), RunningBatch(BLOCK, "cpu")
    for _ in range(60):
        server.rng.choice(EVENTS)(server)
        found, expected = running.facts(server.batch), facts_of(server.batch)
        assert found._replace(drafts=None) == expected._replace(drafts=None)
        assert (found.drafts is None) == (expected.drafts is None)
        if found.drafts is not None and expected.drafts is not None:
            assert torch.equal(found.drafts, expected.drafts)


def test_nothing_is_found_again_while_the_same_requests_run() -> None:
    server, running = Server(0), RunningBatch(BLOCK, "cpu")
    facts = running.facts(server.batch)
    server.batch.filter_batch()  # nobody has finished
    for req in server.batch.reqs:
        req.output_ids.append(7)
    assert running.facts(server.batch) is facts
    assert running.facts(server.batch.copy()) is facts


def test_finished_requests_are_not_kept_alive() -> None:
    server, running = Server(0), RunningBatch(BLOCK, "cpu")
    running.facts(server.batch)
    running.forget()
    assert not any(req in running._reqs for req in server.batch.reqs)
    assert running.facts(server.batch).keys == tuple(req.rid for req in server.batch.reqs)


def test_a_greedy_request_has_no_filters() -> None:
    greedy, sampled = make_request(0), make_request(1, **FILTERS)
    assert most_filters([greedy]) == 0
    assert most_filters([greedy, sampled]) == 2


# ---- limits ------------------------------------------------------------------------------------


def limits_of(batch: Any, draft_range: int | None = None) -> torch.Tensor | None:
    """On the device, by way of what the host knows."""
    limits, facts = CommitLimits(BLOCK, draft_range), facts_of(batch)
    limits.of(batch, facts)
    return limits.on_device(batch, facts)


def test_no_limits_for_ordinary_requests() -> None:
    assert limits_of(batch_of(request_with(), request_with())) is None


def test_a_limited_request_does_not_limit_its_neighbours() -> None:
    batch = batch_of(
        request_with(custom_logit_processor="{}"),
        request_with(),
        request_with(**with_options(max_width=2)),
        request_with(**with_options(max_width=99)),
    )
    assert CommitLimits(BLOCK, None).of(batch, facts_of(batch)) == (1, None, 2, 99)
    found = limits_of(batch)
    assert found is not None
    assert found.tolist() == [0, 3, 1, 3]
    assert found.dtype == torch.int32


@pytest.mark.parametrize(("prefix", "drafts"), [(6, 3), (7, 0), (100, 0)])
@pytest.mark.parametrize("lag", [0, 1])
def test_a_block_that_reaches_past_the_range_is_not_accepted(
    prefix: int, drafts: int, lag: int
) -> None:
    """Positions 0..9; a block at prefix 6 ends at 9, one at prefix 7 at 10.

    Also where the host has one token less than the device.
    """
    req = request_with([0] * (prefix + 1 - 3 - lag), prompt_ids=[0] * 3)
    batch = batch_of(req, lens=[prefix])
    found = limits_of(batch, draft_range=10)
    assert found is not None
    assert found.tolist() == [drafts]
    assert found.dtype == torch.int32
    host = CommitLimits(BLOCK, 10).of(batch, facts_of(batch))
    assert host == (1 if prefix - lag >= 7 else None,)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_limits_follow_the_lengths_of_every_step(seed: int, overlap: bool) -> None:
    """Also where they are looked at only once in a while."""
    rng, draft_range = random.Random(seed), 120
    running, limits = RunningBatch(BLOCK, "cpu"), CommitLimits(BLOCK, draft_range)
    options: list[dict[str, Any]] = [{}, {}, with_options(max_width=2)]

    def arrive() -> Any:
        """With its first token."""
        prompt = [0] * rng.randint(1, 110)
        return request_with([0], prompt_ids=prompt, **rng.choice(options))

    reqs = [arrive() for _ in range(3)]
    lens = [len(req.origin_input_ids) for req in reqs]  # committed, on the device
    late = [0] * len(reqs)  # tokens that have not reached the host
    for _ in range(100):
        batch = batch_of(*reqs, lens=lens)
        facts = running.facts(batch)
        known = [len(req.origin_input_ids) + len(req.output_ids) for req in reqs]
        assert limits.of(batch, facts) == tuple(
            1 if length + BLOCK - 1 > draft_range else limit
            for length, limit in zip(known, facts.limits, strict=True)
        )
        drafts = [
            0 if length + BLOCK - 1 >= draft_range else min(limit or BLOCK, BLOCK) - 1
            for length, limit in zip(lens, facts.limits, strict=True)
        ]
        found = limits.on_device(batch, facts)
        assert drafts == ([BLOCK - 1] * len(reqs) if found is None else found.tolist())
        for row, req in enumerate(reqs):
            commit = rng.choice([1, BLOCK, BLOCK])
            lens[row] += commit
            arrived, late[row] = (late[row], commit) if overlap else (commit, 0)
            req.output_ids += [0] * arrived
            if rng.random() < 0.3:  # a prefill runs first: everything arrives
                req.output_ids += [0] * late[row]
                late[row] = 0
            if rng.random() < 0.05:
                reqs[row] = arrive()
                lens[row], late[row] = len(reqs[row].origin_input_ids), 0
