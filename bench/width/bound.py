"""An upper bound on what choosing the width can gain on this machine: the policy and hindsight.

    python -m bench.width bound --json docs/data/width_bound.json

Recorded accept lengths (bench/width/record.py) are served with the step times that
bench/step/profile.py measured on a server. *Hindsight* knows before each step what will be
accepted, and takes the width, the same for all requests, that maximises tokens per second over the
whole trace. No policy with one width a step can be faster.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from bench import report
from bench.serve.study import LOW
from bench.width.simulator import Costs, fixed_speeds, serve
from bench.width.traces import BLOCK_SIZE, Family, Step, Workload, load_recorded, trace
from dflash_sglang.core.width import CostTable, WidthPolicy, WidthSettings
from dflash_sglang.core.width.cost_model import interpolate

BATCH_SIZES = (1, 8, 32)
STEPS = 3000
SEEDS = 4  # traces
ROUNDS = 8  # of the search for the best rate; it converges in three or four


class Profile(NamedTuple):
    """Step times of a served pair: milliseconds by width, along the batch sizes."""

    batch_sizes: Sequence[int]
    draft: Mapping[int, Sequence[float]]
    verify: Mapping[int, Sequence[float]]
    other: Mapping[int, Sequence[float]]  # all the rest of a step

    def seconds(self, batch_size: int, width: int) -> float:
        """A step that drafts and verifies `width` tokens of each request."""
        parts = [(self.verify, width), (self.other, width)]
        if width > 1:
            parts.append((self.draft, width))
        return sum(self._at(table, batch_size, at) for table, at in parts) / 1e3

    def measured(self, widths: Sequence[int]) -> CostTable:
        """The passes alone, as a server measures them at start."""
        cells = [(b, w) for b in self.batch_sizes for w in widths]
        return CostTable(
            {(b, w): self._at(self.draft, b, w) / 1e3 for b, w in cells if w > 1},
            {(b, w): self._at(self.verify, b, w) / 1e3 for b, w in cells},
        )

    def _at(self, table: Mapping[int, Sequence[float]], batch_size: int, width: int) -> float:
        column = [interpolate(self.batch_sizes, row, batch_size) for row in table.values()]
        return interpolate(list(table), column, width)


class Row(NamedTuple):
    """Speed-ups over plain decoding, means over the traces."""

    families: str
    batch_size: int
    fixed_8: float
    fixed_16: float
    policy: float
    hindsight: float
    bound: float  # hindsight over the better fixed width


def load_profile(file: Path) -> Profile:
    """The step times that `bench/step/profile.py` has written."""
    rows = sorted(
        json.loads(file.read_text())["rows"], key=lambda row: (row["width"], row["batch"])
    )
    tables: list[dict[int, list[float]]] = [{}, {}, {}]
    for row in rows:
        passes = row["draft"], row["verify"]
        for table, value in zip(tables, (*passes, row["step"] - sum(passes)), strict=True):
            table.setdefault(row["width"], []).append(value)
    draft, verify, other = tables
    del draft[1]  # plain decoding drafts nothing
    return Profile(sorted({row["batch"] for row in rows}), draft, verify, other)


def hindsight(steps: Sequence[Step], costs: Costs, widths: Sequence[int]) -> float:
    """Tokens/s of the best sequence of widths.

    The best rate is the fixed point of: maximise tokens - rate * seconds in every step, take tokens
    over seconds for the rate (Dinkelbach, 1967).
    """
    rate = 0.0
    for _ in range(ROUNDS):
        tokens, seconds = 0, 0.0
        for step in steps:
            gains = []
            for width in widths:
                committed = sum(min(n + 1, width) for n in step.accept_lens)
                took = costs.seconds(len(step.keys), width)
                gains.append((committed - rate * took, committed, took))
            _, committed, took = max(gains)
            tokens, seconds = tokens + committed, seconds + took
        rate = tokens / seconds
    return rate


def bound(name: str, families: tuple[Family, ...], batch_size: int, costs: Costs) -> Row:
    """One row."""
    settings = WidthSettings()
    ladder = settings.ladder(BLOCK_SIZE)
    found: dict[str, list[float]] = {}
    for seed in range(SEEDS):
        steps = list(trace(Workload(name, (families,)), batch_size, STEPS, seed))
        (fixed,) = fixed_speeds(steps, costs, batch_size)
        policy = WidthPolicy(BLOCK_SIZE, costs.measured(ladder), settings)
        (served,) = serve(policy, steps, costs, seed).speeds
        best = hindsight(steps, costs, ladder)
        speeds = {"fixed_8": fixed[8], "fixed_16": fixed[16], "policy": served, "hindsight": best}
        for key, speed in speeds.items():
            found.setdefault(key, []).append(speed / fixed[1])
        found.setdefault("bound", []).append(best / max(fixed[8], fixed[16]))
    return Row(name, batch_size, **{key: round(mean(values), 3) for key, values in found.items()})


def cells(row: Row) -> dict[str, object]:
    """A line of the table."""
    return {
        "families": row.families,
        "batch": row.batch_size,
        "fixed 8": f"{row.fixed_8:.2f}x",
        "fixed 16": f"{row.fixed_16:.2f}x",
        "policy": f"{row.policy:.2f}x",
        "hindsight": f"{row.hindsight:.2f}x",
        "over the better fixed": f"{row.bound:.3f}",
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate, print, write."""
    parser = report.new_parser("bench.width.bound", __doc__)
    for name, file, content in (
        ("profile", "step_profile.json", "step times"),
        ("traces", "accept_traces.json", "recorded accept lengths"),
    ):
        parser.add_argument(
            f"--{name}",
            type=Path,
            default=report.DATA / file,
            metavar="FILE",
            help=f"{content}; default: docs/data/{file}",
        )
    given = parser.parse_args(argv)
    costs, families = load_profile(given.profile), load_recorded(given.traces)
    low = tuple(families[name] for name in LOW)
    rows = [
        bound(name, chosen, batch_size, costs)
        for name, chosen in (("all", tuple(families.values())), (", ".join(LOW), low))
        for batch_size in BATCH_SIZES
    ]
    print(report.table(map(cells, rows), given.markdown))
    report.write_json(given, {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
