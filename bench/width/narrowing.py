"""What narrowing one request's verify gains: decided on the device, or by a host that waits for it.

    python -m bench.width narrowing --traces docs/data/accept_traces.json --json FILE

Simulated servers (`bench/width/costs.py`), recorded drafts with the drafter's probabilities, batch
1. On the device the verify keeps its width and leaves rows out of the experts; a host that reads
the probabilities verifies at a narrower width, which saves snapshots as well, and waits. What that
wait costs on a GPU is not known, so it is a parameter. The policy does not know it.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

from bench import report
from bench.progress import progress
from bench.width.costs import SERVERS, Server, Way
from bench.width.simulator import serve
from bench.width.traces import BLOCK_SIZE, Workload, load_recorded, trace
from dflash_sglang.core.width import WidthPolicy, WidthSettings

WAITS = (0.0, 0.5, 1.0, 1.5)  # milliseconds
SEEDS = 8
DEVICE = "on the device"


class Row(NamedTuple):
    """One workload on one server; speeds over those of whole verifies, of the same drafts."""

    server: str
    workload: str
    way: str
    speedup: float  # mean over the traces
    spread: float  # standard deviation over the traces
    verified: float  # mean tokens of a step that drafted


def ways(server: Server) -> Iterator[Way]:
    """The device, and a host that waits longer and longer."""
    yield Way(DEVICE, server, None)
    for wait in WAITS:
        yield Way(f"host waits {wait} ms", server, wait / 1e3)


def simulate(server: Server, workload: Workload, steps: int, seeds: int) -> Iterator[Row]:
    """All ways on the same traces."""
    settings = WidthSettings()
    ladder = settings.ladder(BLOCK_SIZE)
    traces = [list(trace(workload, 1, steps, seed)) for seed in range(seeds)]
    whole = [
        serve(WidthPolicy(BLOCK_SIZE, server.measured(ladder), settings), one, server, seed)
        for seed, one in enumerate(traces)
    ]
    for way in ways(server):
        served = [
            serve(WidthPolicy(BLOCK_SIZE, way.costs(ladder), settings), one, server, seed, way)
            for seed, one in enumerate(traces)
        ]
        speedups = [
            mean(one.speeds) / mean(other.speeds) for one, other in zip(served, whole, strict=True)
        ]
        widths = [width for one in served for width in one.widths]
        yield Row(
            server.name,
            workload.name,
            way.name,
            mean(speedups),
            stdev(speedups) if seeds > 1 else 0.0,
            mean(widths),
        )


def tables(rows: Sequence[Row], markdown: bool) -> Iterator[str]:
    """A table a server: workloads down, ways across."""
    for server in dict.fromkeys(row.server for row in rows):
        lines = []
        for workload in dict.fromkeys(row.workload for row in rows):
            found = [row for row in rows if (row.server, row.workload) == (server, workload)]
            cells = {row.way: f"{row.speedup:.3f} ± {row.spread:.3f}" for row in found}
            lines.append({"drafts": workload, **cells, "verified": f"{found[0].verified:.1f}"})
        yield f"\n{server}: speed over whole verifies, one request"
        yield report.table(lines, markdown)


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate and print."""
    parser = report.new_parser("bench.width.narrowing", __doc__)
    parser.add_argument("--traces", type=Path, required=True, metavar="FILE")
    parser.add_argument("--steps", type=int, default=2000, metavar="N", help="default: 2000")
    given = parser.parse_args(argv)
    families = load_recorded(given.traces)
    workloads = [Workload("all", (tuple(families.values()),))]
    workloads += [Workload(name, ((family,),)) for name, family in families.items()]
    cells = [(server, workload) for server in SERVERS for workload in workloads]
    rows = [
        row
        for server, workload in progress(cells, unit="workloads")
        for row in simulate(server, workload, given.steps, SEEDS)
    ]
    print("\n".join(tables(rows, given.markdown)))
    report.write_json(given, {"rows": rows}, key="provenance")
    return 0


if __name__ == "__main__":
    sys.exit(main())
