"""The width policy against fixed widths and the best width in hindsight, on simulated servers.

    python -m bench.width simulator --traces docs/data/accept_traces.json --json FILE --svg FILE

No model runs. What a step takes comes from a table (`bench/width/costs.py`), what drafts are worth
from generated or recorded traces (`bench/width/traces.py`). The policy observes a step one step
late, as under overlapped scheduling; its duration with 3 % spread, and one step in 100 five times
as long. Speeds are scored without that noise. Where a workload changes, its speed is the mean over
its segments, as if they lasted equally long.
"""

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import NamedTuple, Protocol

import torch
from dflash_kernels.verify_bound import verify_bound

from bench import report
from bench.figures import save
from bench.progress import progress
from bench.width import plot
from bench.width.costs import SERVERS, Server, Way
from bench.width.traces import BLOCK_SIZE, Step, Workload, geometric, trace, workloads
from dflash_sglang.core.width import Bound, CostTable, ObservedStep, WidthPolicy, WidthSettings

FIXED = (1, 8, 16)
SEEDS = 8  # traces at batch size 1


class Costs(Protocol):
    """What steps take on a server that is simulated."""

    def seconds(self, batch_size: int, width: int) -> float:
        """A whole step that drafts and verifies `width` tokens."""

    def measured(self, widths: Sequence[int]) -> CostTable:
        """What measuring at start would give a policy."""


class Row(NamedTuple):
    """One workload at one batch size on one server; speeds in tokens/s."""

    server: str
    workload: str
    batch_size: int
    plain: float
    fixed_8: float
    fixed_16: float
    policy: float
    narrowed: float  # a policy that also narrows on the device; at batch 1, of recorded drafts
    oracle: float  # the best width of the policy's list, of each segment
    oracle_any_width: float  # the best of 1 .. 16, of each segment
    oracle_widths: list[int]  # of the policy's list, by segment
    policy_widths: dict[int, float]  # share of the steps
    worst: float  # policy / oracle of the worst trace

    @property
    def of_oracle(self) -> float:
        """Share of the best width's speed."""
        return self.policy / self.oracle

    @property
    def of_plain(self) -> float:
        """Speed-up over plain decoding."""
        return self.policy / self.plain


class Served(NamedTuple):
    """What a policy made of a trace."""

    speeds: list[float]  # tokens/s by segment
    widths: list[int]  # by step


def serve(
    policy: WidthPolicy, steps: Sequence[Step], server: Costs, seed: int, way: Way | None = None
) -> Served:
    """Let the policy choose every width of a trace.

    Args:
        policy: starts cold.
        steps: the trace.
        server: what steps take.
        seed: of the noise.
        way: how verifies of one request are narrowed, on the `Server` whose costs `policy` has.
    """
    rng = Random(seed)
    tokens = Counter[int]()  # by segment
    seconds: defaultdict[int, float] = defaultdict(float)
    widths: list[int] = []
    learn: Callable[[], None] | None = None  # from the last step
    running: set[int] = set()
    for step in steps:
        width = policy.choose(step.keys)
        for key in running.difference(step.keys):
            policy.forget(key)
        running = set(step.keys)
        if learn is not None:
            learn()
        verified, took, bound = width, server.seconds(len(step.keys), width), None
        if way is not None and (bound := bound_of(policy, step, width)) is not None:
            if way.wait is not None:  # the host has backends and graphs of these widths only
                wider = min(w for w in policy.widths if w >= bound.verified)
                bound = bound._replace(verified=wider)
            verified = bound.verified
            took += way.extra_seconds(width, verified)
        accept_lens = [min(accepted, verified - 1) for accepted in step.accept_lens]
        noise = rng.lognormvariate(0.0, 0.03) * (5 if rng.random() < 0.01 else 1)
        observed = ObservedStep(step.keys, accept_lens, width, took * noise, bound=bound)
        learn = partial(policy.observe, observed)
        tokens[step.segment] += sum(accept_lens) + len(step.keys)
        seconds[step.segment] += took
        widths.append(verified)
    return Served([tokens[segment] / seconds[segment] for segment in sorted(tokens)], widths)


def bound_of(policy: WidthPolicy, step: Step, width: int) -> Bound | None:
    """The device's decision; None where no probabilities were recorded, or nothing is narrowed."""
    confidences = step.drafts[0].confidences
    if len(step.keys) > 1 or confidences is None:
        return None
    tables = policy.bound_tables(step.keys[0], width)
    if tables is None:
        return None
    probabilities = torch.tensor(confidences[: width - 1])
    verified, _, *classes = verify_bound(
        probabilities.log(),
        torch.zeros_like(probabilities),
        torch.tensor(tables.acceptance),
        torch.tensor(tables.prices),
    ).tolist()
    return Bound(verified, classes)


def fixed_speeds(steps: Iterable[Step], server: Costs, batch_size: int) -> list[dict[int, float]]:
    """Tokens/s of every fixed width, by segment."""
    accepted: dict[int, Counter[int]] = {}
    for step in steps:
        accepted.setdefault(step.segment, Counter()).update(step.accept_lens)
    return [
        {
            width: batch_size * mean_commit(counts, width) / server.seconds(batch_size, width)
            for width in range(1, BLOCK_SIZE + 1)
        }
        for counts in accepted.values()
    ]


def mean_commit(accept_lens: Counter[int], width: int) -> float:
    """Mean tokens that a request commits in a step of this width."""
    committed = sum(times * min(n + 1, width) for n, times in accept_lens.items())
    return committed / accept_lens.total()


def simulate(server: Server, workload: Workload, batch_size: int, steps: int, seed: int) -> Row:
    """One row from one trace."""
    settings = WidthSettings()
    served_trace = list(trace(workload, batch_size, steps, seed))
    by_segment = fixed_speeds(served_trace, server, batch_size)
    ladder = settings.ladder(BLOCK_SIZE)

    policy = WidthPolicy(BLOCK_SIZE, server.measured(ladder), settings)
    served = serve(policy, served_trace, server, seed)
    way = Way("on the device", server, None)
    narrowing = WidthPolicy(BLOCK_SIZE, way.costs(ladder), settings)

    def best(widths: Sequence[int]) -> list[int]:
        return [max(widths, key=speeds.__getitem__) for speeds in by_segment]

    def speed(widths: Iterable[int]) -> float:
        return mean(speeds[w] for speeds, w in zip(by_segment, widths, strict=True))

    plain, fixed_8, fixed_16 = (speed([width] * len(by_segment)) for width in FIXED)
    return Row(
        server=server.name,
        workload=workload.name,
        batch_size=batch_size,
        plain=plain,
        fixed_8=fixed_8,
        fixed_16=fixed_16,
        policy=mean(served.speeds),
        narrowed=mean(serve(narrowing, served_trace, server, seed, way).speeds),
        oracle=speed(best(ladder)),
        oracle_any_width=speed(best(range(1, BLOCK_SIZE + 1))),
        oracle_widths=best(ladder),
        policy_widths={
            w: n / len(served.widths) for w, n in sorted(Counter(served.widths).items())
        },
        worst=mean(served.speeds) / speed(best(ladder)),
    )


def average(rows: Sequence[Row]) -> Row:
    """The mean of several traces; widths are those of the first."""
    keys = ("plain", "fixed_8", "fixed_16", "policy", "narrowed", "oracle", "oracle_any_width")
    means = {key: mean(getattr(row, key) for row in rows) for key in keys}
    return rows[0]._replace(**means, worst=min(row.worst for row in rows))


def tables(rows: Sequence[Row], markdown: bool) -> Iterator[str]:
    """Speed-ups over plain decoding, one table a server."""
    for server in dict.fromkeys(row.server for row in rows):
        of_server = [row for row in rows if row.server == server]
        yield f"\n{server}: fixed 8 / fixed 16 / policy / best width"
        lines = []
        for name in dict.fromkeys(row.workload for row in of_server):
            found = [row for row in of_server if row.workload == name]
            speedups = {
                f"batch {row.batch_size}": " / ".join(
                    f"{speed / row.plain:.2f}"
                    for speed in (row.fixed_8, row.fixed_16, row.policy, row.oracle)
                )
                for row in found
            }
            ratios = [row.of_oracle for row in found]
            share = f"{min(ratios):.3f} .. {max(ratios):.3f}"
            lines.append({"drafts": name, **speedups, "policy / best": share})
        yield report.table(lines, markdown)
        gains = [
            f"{row.workload}, batch {row.batch_size}: {row.narrowed / row.policy - 1:+.1%}"
            for row in of_server
            if row.narrowed != row.policy
        ]
        if gains:
            yield f"\nNarrowing on the device gains: {'; '.join(gains)}"


def decision_microseconds(batch_size: int) -> tuple[float, float]:
    """Median time of `choose` and of `observe` on this machine."""
    server, settings = SERVERS[0], WidthSettings()
    policy = WidthPolicy(BLOCK_SIZE, server.measured(settings.ladder(BLOCK_SIZE)), settings)
    mixed = Workload("mixed", ((geometric(0.6), geometric(0.9)),))
    choosing, observing = [], []
    for step in trace(mixed, batch_size, 500, seed=1):
        begin = time.perf_counter()
        policy.choose(step.keys)
        chosen = time.perf_counter()
        choosing.append(chosen - begin)
        step_seconds = server.seconds(batch_size, BLOCK_SIZE)
        observed = ObservedStep(step.keys, step.accept_lens, BLOCK_SIZE, step_seconds)
        begin = time.perf_counter()
        policy.observe(observed)
        observing.append(time.perf_counter() - begin)
    return median(choosing) * 1e6, median(observing) * 1e6


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate everything, print the tables, write files."""
    parser = report.new_parser("bench.width.simulator", __doc__)
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the rows there")
    parser.add_argument("--traces", type=Path, metavar="FILE", help="also simulate recorded traces")
    parser.add_argument("--steps", type=int, default=2000, metavar="N", help="default: 2000")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128], metavar="N")
    given = parser.parse_args(argv)
    cells = [
        (server, workload, batch_size)
        for server in SERVERS
        for workload in workloads(given.traces)
        for batch_size in given.batch
    ]
    rows = []
    for server, workload, batch_size in progress(cells, unit="rows"):
        # A single request varies from trace to trace; a large batch is its own average.
        seeds = range(SEEDS if batch_size == 1 else 1)
        traces = [simulate(server, workload, batch_size, given.steps, seed) for seed in seeds]
        rows.append(average(traces))
    print("\n".join(tables(rows, given.markdown)))
    for batch_size in given.batch:
        choose, observe = decision_microseconds(batch_size)
        print(f"batch {batch_size}: choose {choose:.0f} us, observe {observe:.0f} us")
    report.write_json(given, {"rows": rows}, key="provenance")
    if given.svg is not None:
        save(plot.draw([row._asdict() for row in rows]), given.svg)
    return 0


if __name__ == "__main__":
    sys.exit(main())
