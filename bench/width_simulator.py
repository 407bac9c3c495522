"""The width policy against fixed widths and the best width in hindsight, on simulated servers.

    python -m bench.width_simulator --traces docs/data/accept_traces.json --json FILE --svg FILE

No model runs. What a step takes comes from a table (`bench/width_costs.py`), what drafts are worth
from generated or recorded traces (`bench/width_traces.py`). The policy is told of a step one step
late, as under overlapped scheduling; its duration with 3 % spread, and one step in 100 five times
as long. Speeds are scored without that noise. Where a workload changes, its speed is the mean over
its segments, as if they lasted equally long.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import mean
from typing import NamedTuple

from tqdm import tqdm

from bench import width_plot
from bench.width_costs import SERVERS, Server
from bench.width_traces import BLOCK_SIZE, Step, Workload, trace, workloads
from dflash_sglang.core.width import ObservedStep, WidthPolicy, WidthSettings

FIXED = (1, 8, 16)


class Row(NamedTuple):
    """One workload at one batch size on one server; speeds in tokens/s."""

    server: str
    workload: str
    batch_size: int
    plain: float
    fixed_8: float
    fixed_16: float
    policy: float
    oracle: float  # the best width of the policy's list, of each segment
    oracle_any_width: float  # the best of 1 .. 16, of each segment
    oracle_widths: list[int]  # of the policy's list, by segment
    policy_widths: dict[int, float]  # share of the steps
    switches: int  # steps whose width was not that of the step before

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


def serve(policy: WidthPolicy, steps: Sequence[Step], server: Server, seed: int) -> Served:
    """Let the policy choose every width of a trace."""
    rng = Random(seed)
    tokens, seconds = Counter[int](), Counter[int]()
    widths: list[int] = []
    late: ObservedStep | None = None
    running: set[int] = set()
    for step in steps:
        width = policy.choose(step.keys)
        for key in running.difference(step.keys):
            policy.forget(key)
        running = set(step.keys)
        if late is not None:
            policy.observe(late)
        accept_lens = [min(accepted, width - 1) for accepted in step.accept_lens]
        took = server.seconds(len(step.keys), width)
        noise = rng.lognormvariate(0.0, 0.03) * (5 if rng.random() < 0.01 else 1)
        late = ObservedStep(step.keys, accept_lens, width, took * noise)
        tokens[step.segment] += sum(accept_lens) + len(step.keys)
        seconds[step.segment] += took
        widths.append(width)
    return Served([tokens[segment] / seconds[segment] for segment in sorted(tokens)], widths)


def fixed_speeds(steps: Iterable[Step], server: Server, batch_size: int) -> list[list[float]]:
    """Tokens/s of every fixed width 0 .. BLOCK_SIZE (0: nothing) by segment."""
    accepted: dict[int, Counter[int]] = {}
    for step in steps:
        accepted.setdefault(step.segment, Counter()).update(step.accept_lens)
    speeds = []
    for counts in accepted.values():
        seconds = counts.total() / batch_size  # times those of a step
        committed = [sum(c * min(n + 1, w) for n, c in counts.items()) for w in range(17)]
        speeds.append(
            [0.0]
            + [
                committed[width] / seconds / server.seconds(batch_size, width)
                for width in range(1, BLOCK_SIZE + 1)
            ]
        )
    return speeds


def simulate(
    server: Server, workload: Workload, batch_size: int, steps: int, settings: WidthSettings
) -> Row:
    """One row."""
    served_trace = list(trace(workload, batch_size, steps, seed=1))
    by_segment = fixed_speeds(served_trace, server, batch_size)
    policy = WidthPolicy(BLOCK_SIZE, server.measured(settings.ladder(BLOCK_SIZE)), settings)
    served = serve(policy, served_trace, server, seed=2)

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
        oracle=speed(best(policy.widths)),
        oracle_any_width=speed(best(range(1, BLOCK_SIZE + 1))),
        oracle_widths=best(policy.widths),
        policy_widths={
            w: n / len(served.widths) for w, n in sorted(Counter(served.widths).items())
        },
        switches=sum(a != b for a, b in pairwise(served.widths)),
    )


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The rows as Markdown; speeds as speed-up over plain decoding."""
    yield (
        "| server | workload | batch | fixed 8 | fixed 16 | policy | best width | any width "
        "| policy / best |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        widths = ", ".join(map(str, row.oracle_widths))
        yield (
            f"| {row.server} | {row.workload} | {row.batch_size} "
            f"| {row.fixed_8 / row.plain:.2f} | {row.fixed_16 / row.plain:.2f} "
            f"| {row.of_plain:.2f} | {row.oracle / row.plain:.2f} (w={widths}) "
            f"| {row.oracle_any_width / row.plain:.2f} | {row.of_oracle:.3f} |"
        )


def decision_microseconds(batch_size: int) -> tuple[float, float]:
    """Mean time of `choose` and of `observe` on this machine."""
    server, settings = SERVERS[0], WidthSettings()
    policy = WidthPolicy(BLOCK_SIZE, server.measured(settings.ladder(BLOCK_SIZE)), settings)
    steps = list(trace(workloads(None)[7], batch_size, 500, seed=1))
    spent = [0.0, 0.0]

    def timed(which: int, call: Callable[[], object]) -> None:
        begin = time.perf_counter()
        call()
        spent[which] += time.perf_counter() - begin

    for step in steps:
        timed(0, lambda: policy.choose(step.keys))  # noqa: B023
        took = server.seconds(batch_size, 16)
        observed = ObservedStep(step.keys, step.accept_lens, 16, took)
        timed(1, lambda: policy.observe(observed))  # noqa: B023
    return spent[0] / len(steps) * 1e6, spent[1] / len(steps) * 1e6


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench.width_simulator", description="See the module.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw them there")
    parser.add_argument("--traces", type=Path, metavar="FILE", help="recorded traces, too")
    parser.add_argument("--steps", type=int, default=2000, metavar="N", help="default: 2000")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128], metavar="N")
    return parser.parse_args(argv)


def main() -> None:
    """Simulate everything, print the table, write what was asked for."""
    given = parse()
    cells = [
        (server, workload, batch_size)
        for server in SERVERS
        for workload in workloads(given.traces)
        for batch_size in given.batch
    ]
    settings = WidthSettings()
    rows = [simulate(*cell, given.steps, settings) for cell in tqdm(cells, unit=" runs")]
    print("\n".join(table(rows)))
    for batch_size in given.batch:
        choose, observe = decision_microseconds(batch_size)
        print(f"batch {batch_size}: choose {choose:.0f} us, observe {observe:.0f} us")
    if given.json is not None:
        result = {"steps": given.steps, "rows": [row._asdict() for row in rows]}
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    if given.svg is not None:
        given.svg.write_text(width_plot.svg([row._asdict() for row in rows]))


if __name__ == "__main__":
    main()
