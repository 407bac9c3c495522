"""Where the time of a decode step goes on a CPU, and what its forwards alone would allow.

    python -m bench.step profile --json docs/data/step_profile.json

Plain decoding and three fixed widths serve held-out prompts at three concurrencies; in the
scheduler a plugin (`bench/harness/server_side/step_times.py`) times the parts of every step that
no prefill precedes. Two speed-ups over plain decoding follow, without prefills:

    decode   tau * plain step / step
    bound    tau * plain step / (draft forward + verify forward)

The bound is what would be left if scheduling, accepting and context KV took no time.
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bench import report
from bench.harness import scripts
from bench.harness.servers import settings
from bench.progress import progress
from dflash_sglang import zoo
from launch import load
from launch.comparison import choose_prompts
from launch.serving import Server

CONCURRENCIES = (1, 8, 32)
WIDTHS = (4, 8, 16)
PROMPTS, MAX_NEW_TOKENS, SWEEPS = 64, 192, 3
MIN_STEPS = 5  # of a batch size, to take a median of


class Row(NamedTuple):
    """Steps of one batch size at one width; medians in milliseconds."""

    width: int  # 1: plain decoding
    batch: int
    steps: int
    tau: float
    step: float
    draft: float
    verify: float
    context_kv: float
    accept: float
    rest: float
    decode: float  # speed-up over plain decoding
    bound: float


Times = Mapping[str, Mapping[str, Sequence[float]]]  # {batch size: {part: seconds}}


def profile(width: int, folder: Path) -> tuple[dict[int, float], Times]:
    """Serve at one width: tau by concurrency, and the times of the parts."""
    env = scripts.plugin_environment(folder / f"plugin-{width}", "step_times")
    times = folder / f"times-{width}.json"
    pair = zoo.path("moe")
    args = ["--max-running-requests", "32", "--max-total-tokens", "16384"]
    args += ["--min-free-slots-delay", "1", "--disable-overlap-schedule"]
    if width > 1:
        args += settings(folder / f"settings-{width}.json", width="fixed", max_width=width)
    drafter = pair.drafter if width > 1 else None
    prompts = [prompt.text for prompt in choose_prompts("moe", PROMPTS)]
    taus = {}
    with Server(
        pair.verifier, drafter, args=args, env={**env, "DFLASH_STEP_TIMES": str(times)}
    ) as server:
        for concurrency in CONCURRENCIES:
            sweeps = [load.run(server, prompts, concurrency, MAX_NEW_TOKENS) for _ in range(SWEEPS)]
            taus[concurrency] = load.tau(a for one in sweeps for a in one.answers)
    return taus, json.loads(times.read_text())


def rows_of(width: int, taus: Mapping[int, float], times: Times, plain: Times) -> list[Row]:
    """One row a concurrency, from the steps in which all its requests ran."""
    rows = []
    for concurrency in CONCURRENCIES:
        parts = times[str(concurrency)]
        assert len(parts["step"]) >= MIN_STEPS, f"{len(parts['step'])} steps at batch {concurrency}"
        took = {name: 1000 * statistics.median(values) for name, values in parts.items()}
        draft, verify = took.get("draft", 0.0), took.get("verify", took.get("plain", 0.0))
        context_kv, accept = took.get("context KV", 0.0), took.get("accept", 0.0)
        gain = taus[concurrency] * 1000 * statistics.median(plain[str(concurrency)]["step"])
        row = Row(
            width=width,
            batch=concurrency,
            steps=len(parts["step"]),
            tau=taus[concurrency],
            step=took["step"],
            draft=draft,
            verify=verify,
            context_kv=context_kv,
            accept=accept,
            rest=took["step"] - draft - verify - context_kv - accept,
            decode=gain / took["step"],
            bound=gain / (draft + verify),
        )
        rows.append(Row._make(round(value, 3) for value in row))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Profile, print, write."""
    given = report.new_parser("bench.step.profile", __doc__).parse_args(argv)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        taus, plain = profile(1, folder)
        rows += rows_of(1, taus, plain, plain)
        for width in progress(WIDTHS, unit="widths"):
            rows += rows_of(width, *profile(width, folder), plain)
    by_batch = sorted(rows, key=lambda one: (one.batch, one.width))
    print(report.table((row._asdict() for row in by_batch), given.markdown))
    report.write_json(given, {"rows": rows}, passes=SWEEPS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
