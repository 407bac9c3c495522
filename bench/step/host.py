"""The host's microseconds of one decode step, ours beside SGLang's own worker.

    python -m bench.step host --json docs/data/step_host.json

Both workers run their own code in one process, by turns (`bench/harness/fake_gpu/on_host.py`): a
steady batch of SGLang's own requests, an overlapped server, one rank, the whole block verified, the
width policy with outcomes that arrive a step late. Counted are

    prepare  what a worker's state does in the scheduler's `prepare_for_decode`
    step     `forward_batch_generation` and the report of the previous step's outcome

Not counted, for both alike: model forwards and attention plans; what a launch takes (the number of
launches outside the forwards is a column); the allocation of KV slots; CUDA's own time for events,
copies and allocations; the scheduler. torch's ops run on the CPU, on the smallest tensors that fit:
a call costs about what a call on CUDA costs the host, and at batch 256 some compute on top. Times
are the thread's CPU time, which other processes of the machine disturb less than its wall time.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.draft_worker_common import make_draft_input_v2
from torch import Tensor

from bench import report
from bench.harness.fake_gpu import our_worker, sglang_worker
from bench.harness.fake_gpu.on_host import (
    FILTERS,
    HostServer,
    device_is_host,
    make_batch,
    make_request,
)
from bench.harness.fake_gpu.traffic import BLOCK
from bench.progress import progress
from dflash_sglang.core.width import CostTable, WidthSettings
from dflash_sglang.step.state import DraftState

BATCHES = (1, 8, 64, 256)
REQUESTS: dict[str, dict[str, Any]] = {"greedy": {}, "filtered": FILTERS}
WORKERS = ("sglang", "ours")
NARROWS = "ours, narrows"  # a single request's verify, where the verifier has experts
ROUNDS, STEPS, WARM_UP = 9, 60, 20


class Cost(NamedTuple):
    """Microseconds of one step."""

    prepare: float
    step: float


class Row(NamedTuple):
    """Steps of one batch size; medians in microseconds, with the quartiles of the step."""

    requests: str  # greedy, or filtered: temperature, top-k and top-p
    batch: int
    worker: str
    prepare: float
    step: float
    quartiles: tuple[float, float]
    above: float  # SGLang's step
    launches: int  # that a step would make outside the forwards, past torch's dispatcher


def flat_costs(*, narrows: bool = False) -> CostTable:
    """Costs by which it is always worth it to draft the whole block."""
    ladder = WidthSettings().ladder(BLOCK)
    verify = {(batch, width): 0.01 for batch in BATCHES for width in ladder}
    draft = {key: 0.0001 for key in verify if key[1] > 1}
    bounded = {(n, width): 0.009 + 0.001 * n / width for _, width in draft for n in (1, width)}
    return CostTable(draft, verify, bounded=bounded if narrows else None)


class Stepper:
    """A worker and its batch, step after step."""

    def __init__(self, worker: Any, state: Any, batch: int, sampling: dict[str, Any]) -> None:
        self.worker = worker
        self.batch = make_batch([make_request(row, **sampling) for row in range(batch)], state)
        rng = random.Random(batch)
        share = [rng.random() for _ in range(batch)]  # of accepted drafts, by request
        self._outcomes = [[_accepted(rng, one) for one in share] for _ in range(STEPS)]
        self._at = 0

    def run(self) -> Cost:
        """One step; the outcome of the one before arrives."""
        batch, outcome = self.batch, self._outcomes[self._at % STEPS]
        self._at += 1
        batch.forward_mode, batch.seq_lens_sum = ForwardMode.DECODE, None
        begin = time.thread_time()
        batch.spec_info.prepare_for_decode(batch)
        prepared = time.thread_time()
        result = self.worker.forward_batch_generation(batch, on_publish=_ignore)
        if self._at > 1:
            self.worker.on_verify_complete_cpu(outcome, batch_size=len(outcome))
        end = time.thread_time()
        batch.spec_info = result.next_draft_input
        return Cost(1e6 * (prepared - begin), 1e6 * (end - prepared))


def _accepted(rng: random.Random, share: float) -> int:
    accepted = 0
    while accepted < BLOCK - 1 and rng.random() < share:
        accepted += 1
    return accepted


def _ignore(new_seq_lens: Tensor) -> None:
    """The scheduler's part of a publish."""


def make_stepper(worker: str, batch: int, sampling: dict[str, Any]) -> Stepper:
    """A worker with a batch of its own."""
    empty = torch.zeros(batch, dtype=torch.int64)
    server = HostServer()
    if worker == "sglang":
        state = make_draft_input_v2(bonus_tokens=empty, new_seq_lens=empty)
        return Stepper(sglang_worker.make_worker(server), state, batch, sampling)
    ours = our_worker.make_worker(server, narrows=worker == NARROWS)
    ours._widths.start(flat_costs(narrows=worker == NARROWS))
    return Stepper(ours, DraftState(empty, empty), batch, sampling)


def measure(requests: str, batch: int) -> list[Row]:
    """The workers by turns."""
    workers = (*WORKERS, NARROWS) if batch == 1 else WORKERS
    with device_is_host() as launches:
        steppers = {name: make_stepper(name, batch, REQUESTS[requests]) for name in workers}
        costs: dict[str, list[Cost]] = {name: [] for name in workers}
        counts = {}
        for name, stepper in steppers.items():
            for _ in range(WARM_UP):
                stepper.run()
            launches.count = 0
            stepper.run()
            counts[name] = launches.count
        gc.collect()
        gc.disable()
        for turn in range(ROUNDS):
            for name in workers if turn % 2 else reversed(workers):
                costs[name] += [steppers[name].run() for _ in range(STEPS)]
        gc.enable()
    base = statistics.median(one.step for one in costs["sglang"])
    return [_row(requests, batch, name, costs[name], base, counts[name]) for name in workers]


def _row(
    requests: str, batch: int, worker: str, costs: Sequence[Cost], base: float, launches: int
) -> Row:
    steps = [one.step for one in costs]
    quartiles = statistics.quantiles(steps)
    return Row(
        requests=requests,
        batch=batch,
        worker=worker,
        prepare=round(statistics.median(one.prepare for one in costs), 1),
        step=round(statistics.median(steps), 1),
        quartiles=(round(quartiles[0], 1), round(quartiles[2], 1)),
        above=round(statistics.median(steps) - base, 1),
        launches=launches,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    given = report.new_parser("bench.step.host", __doc__).parse_args(argv)
    torch.set_num_threads(1)
    cases = [(requests, batch) for requests in REQUESTS for batch in BATCHES]
    rows = [row for case in progress(cases, unit="batches") for row in measure(*case)]
    print(report.table((row._asdict() for row in rows), given.markdown))
    report.write_json(given, {"rows": rows}, rounds=ROUNDS, steps=STEPS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
