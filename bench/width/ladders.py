"""Which widths are worth their graphs? The policy with shorter ladders, on simulated servers.

    python -m bench.width ladders --json docs/data/width_ladders.json

Every width costs captured graphs and start time. Ladders are compared by what the policy makes of
the same traces with each of them, relative to the finest: the servers and workloads of
`bench.width simulator`, and the step times of a CPU (docs/data/step_profile.json).
"""

import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from bench import report
from bench.progress import progress
from bench.width.bound import load_profile
from bench.width.costs import SERVERS
from bench.width.simulator import Costs, serve
from bench.width.traces import BLOCK_SIZE, Step, Workload, trace, workloads
from dflash_sglang.core.width import WidthPolicy, WidthSettings

FINEST = (1, 2, 4, 8, 12, 16)
LADDERS = (FINEST, (1, 2, 4, 8, 16), (1, 4, 8, 16), (1, 4, 16), (1, 8, 16), (1, 16), (4, 8, 16))
BATCH_SIZES = (1, 4, 16, 32, 48, 64, 128)
CPU_BATCH_SIZES = (1, 8, 32)  # those that were measured
SEEDS = 4  # traces at batch size 1


class Row(NamedTuple):
    """A ladder at one batch size of one server; speeds relative to the finest ladder's."""

    server: str
    ladder: str
    batch_size: int
    mean: float  # over the workloads
    least: float
    workload: str  # of the least


def speed(ladder: tuple[int, ...], steps: Sequence[Step], server: Costs, seed: int) -> float:
    """Tokens/s of the policy, the mean over the segments of a trace."""
    settings = WidthSettings(widths=ladder, min_width=ladder[0])
    policy = WidthPolicy(BLOCK_SIZE, server.measured(ladder), settings)
    return mean(serve(policy, steps, server, seed).speeds)


def listed(ladder: Sequence[int]) -> str:
    """As the tables name it."""
    return ", ".join(map(str, ladder))


@cache
def steps_of(workload: Workload, batch_size: int, steps: int, seed: int) -> list[Step]:
    """The trace that all ladders are given."""
    return list(trace(workload, batch_size, steps, seed))


def compare(
    name: str, server: Costs, batch_size: int, given: Sequence[Workload], steps: int
) -> Iterator[Row]:
    """All ladders at one batch size."""
    seeds = range(SEEDS if batch_size == 1 else 1)
    finest: dict[str, float] = {}
    for ladder in LADDERS:
        relative = {}
        for workload in given:
            traces = [steps_of(workload, batch_size, steps, seed) for seed in seeds]
            tokens = mean(speed(ladder, one, server, n) for n, one in enumerate(traces))
            relative[workload.name] = tokens / finest.setdefault(workload.name, tokens)
        worst = min(relative, key=relative.__getitem__)
        yield Row(
            name,
            listed(ladder),
            batch_size,
            round(mean(relative.values()), 4),
            round(relative[worst], 4),
            worst,
        )


def table(rows: Sequence[Row], markdown: bool) -> Iterator[str]:
    """One table a server: mean and least over the workloads, by batch size."""
    for server in dict.fromkeys(row.server for row in rows):
        of_server = [row for row in rows if row.server == server]
        yield f"\n{server}: speed relative to {listed(FINEST)}, mean (least) of the workloads"
        lines = []
        for ladder in dict.fromkeys(row.ladder for row in of_server):
            cells = {
                f"batch {row.batch_size}": f"{row.mean:.3f} ({row.least:.3f})"
                for row in of_server
                if row.ladder == ladder
            }
            lines.append({"widths": ladder, **cells})
        yield report.table(lines, markdown)


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate, print, write."""
    parser = report.new_parser("bench.width.ladders", __doc__)
    for name, file in (("traces", "accept_traces.json"), ("profile", "step_profile.json")):
        parser.add_argument(
            f"--{name}",
            type=Path,
            default=report.DATA / file,
            metavar="FILE",
            help=f"default: docs/data/{file}",
        )
    parser.add_argument("--steps", type=int, default=1000, metavar="N", help="default: 1000")
    given = parser.parse_args(argv)
    servers: list[tuple[str, Costs, Sequence[int]]] = [
        *((server.name, server, BATCH_SIZES) for server in SERVERS),
        ("CPU", load_profile(given.profile), CPU_BATCH_SIZES),
    ]
    offered = workloads(given.traces)
    cells = [(name, server, batch) for name, server, batches in servers for batch in batches]
    rows = [
        row
        for name, server, batch in progress(cells, unit="batch sizes")
        for row in compare(name, server, batch, offered, given.steps)
    ]
    print("\n".join(table(rows, given.markdown)))
    report.write_json(given, {"rows": rows}, key="provenance")
    return 0


if __name__ == "__main__":
    sys.exit(main())
