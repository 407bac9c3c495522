"""Serving speed with the verify width adaptive and fixed, beside plain decoding and SGLang's own.

    python -m bench.serve study --json docs/data/width.json
    python -m bench.serve study --rounds 1 --only random        # one workload

All servers stay up and take turns, workload by workload and round by round, so that a busy minute
of the machine affects all of them; waiting servers sleep. Every answer is compared with plain
decoding's. Exit status 1 if one differs.
"""

import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from bench import report
from bench.harness import checkpoints
from bench.harness.servers import settings
from bench.progress import progress
from bench.serve import latency, switch
from dflash_sglang import zoo
from launch import load
from launch.comparison import choose_prompts
from launch.serving import Server

# Prompts of a sweep by concurrency: some seconds of plain decoding, most of them at full load.
PROMPTS = {1: 36, 8: 96, 32: 256}
CONCURRENCIES = tuple(PROMPTS)
MAX_NEW_TOKENS = 192
ADAPTIVE = "adaptive"
TRAINED, RANDOM, NONE = "trained", "random", "none"
LOW = ("sort", "count")  # families whose drafts are often rejected


class Mode(NamedTuple):
    """One way to serve."""

    mode: str  # plain, builtin (SGLang's own worker) or dflash (ours)
    drafter: str
    block_size: int | str  # of our worker the verify width; 1: no speculation


PLAIN = Mode("plain", NONE, 1)
OURS = Mode("dflash", TRAINED, ADAPTIVE)
MODES = (
    PLAIN,
    Mode("builtin", TRAINED, 8),
    Mode("builtin", TRAINED, 16),
    Mode("dflash", TRAINED, 8),
    Mode("dflash", TRAINED, 16),
    OURS,
    Mode("dflash", RANDOM, 16),
    Mode("dflash", RANDOM, ADAPTIVE),
)


class Workload(NamedTuple):
    """Prompts and the modes that answer them."""

    name: str
    prompts: Sequence[str]  # the first `PROMPTS[concurrency]` of them in each sweep, or all
    modes: Sequence[Mode]


class Row(NamedTuple):
    """One mode at one concurrency, over all rounds."""

    workload: str
    mode: str
    drafter: str
    concurrency: int
    block_size: int | str
    tokens_per_s: float  # median of the rounds
    tokens_per_s_rounds: list[float]
    tau: float
    speedup: float  # over plain decoding, the median of the rounds' ratios
    identical: bool


def workloads() -> list[Workload]:
    """Everything that is measured."""
    mixed = [prompt.text for prompt in choose_prompts("moe", max(PROMPTS.values()))]
    pairs = zip(*(zoo.prompts("moe")[family] for family in LOW), strict=True)
    low = [prompt.text for pair in pairs for prompt in pair]
    trained = [mode for mode in MODES if mode.drafter != RANDOM]
    ours = [mode for mode in trained if mode.mode != "builtin"]
    untrained = [PLAIN, *(mode for mode in MODES if mode.drafter == RANDOM)]
    return [
        Workload("all families", mixed, trained),
        Workload("low acceptance", low, ours),
        Workload("random", mixed, untrained),
    ]


def make_server(mode: Mode, folder: Path, max_running: int) -> Server:
    """The same limits for all, so that only the worker differs."""
    args = ["--max-running-requests", str(max_running), "--max-total-tokens", "16384"]
    args += ["--min-free-slots-delay", "1"]
    # Nothing runs beside the scheduler on a CPU: overlap would only add a step to every answer.
    args.append("--disable-overlap-schedule")
    drafter, env = None, {}
    if mode.mode != "plain":
        drafter = zoo.path("moe").drafter
        if mode.drafter == RANDOM:
            drafter = folder / "random"
    if mode.mode == "builtin":
        env = {"DFLASH_SGLANG_WORKER": "builtin"}
        args += ["--speculative-dflash-block-size", str(mode.block_size)]
    if mode.mode == "dflash":
        chosen: dict[str, object] = {} if mode.block_size == ADAPTIVE else {"width": "fixed"}
        if mode.block_size not in (ADAPTIVE, 16):
            chosen["max_width"] = mode.block_size
        args += settings(folder / f"{mode.drafter}-{mode.block_size}.json", **chosen)
    return Server(zoo.path("moe").verifier, drafter, args=args, env=env)


Sweeps = dict[tuple[str, Mode, int], list[load.Load]]


def measure(servers: Mapping[Mode, Server], chosen: Sequence[Workload], rounds: int) -> Sweeps:
    """All sweeps over the prompts; those of a round follow one another."""
    sweeps: Sweeps = defaultdict(list)
    total = rounds * sum(len(one.modes) * len(CONCURRENCIES) for one in chosen)
    with progress(unit="sweeps", total=total) as bar:
        for workload in chosen:
            for number in range(1 + rounds):  # one to warm up
                for concurrency in CONCURRENCIES:
                    count = PROMPTS[concurrency] if number else concurrency
                    prompts = workload.prompts[:count]
                    for mode in workload.modes:
                        done = load.run(servers[mode], prompts, concurrency, MAX_NEW_TOKENS)
                        if number:
                            sweeps[workload.name, mode, concurrency].append(done)
                            bar.update()
    return sweeps


def rows_of(sweeps: Sweeps) -> list[Row]:
    """Medians, and speed-ups over the plain sweep of the same round."""
    rows = []
    for (workload, mode, concurrency), loads in sweeps.items():
        plain = sweeps[workload, PLAIN, concurrency]
        rates = [one.tokens_per_s for one in loads]
        ratios = [rate / base.tokens_per_s for rate, base in zip(rates, plain, strict=True)]
        rows.append(
            Row(
                workload=workload,
                mode=mode.mode,
                drafter=mode.drafter,
                concurrency=concurrency,
                block_size=mode.block_size,
                tokens_per_s=round(statistics.median(rates), 1),
                tokens_per_s_rounds=[round(rate, 1) for rate in rates],
                tau=round(load.tau(a for one in loads for a in one.answers), 3),
                speedup=round(statistics.median(ratios), 3),
                identical=all(
                    load.first_difference(plain[0].answers, one.answers) is None for one in loads
                ),
            )
        )
    return rows


def cells(row: Row) -> dict[str, object]:
    """A line of the table."""
    rounds = row.tokens_per_s_rounds
    return {
        "workload": row.workload,
        "mode": row.mode,
        "drafter": row.drafter,
        "concurrency": row.concurrency,
        "width": row.block_size,
        "tokens/s": f"{row.tokens_per_s:.0f}",
        "min..max": f"{min(rounds):.0f}..{max(rounds):.0f}",
        "tau": f"{row.tau:.2f}",
        "speed-up": f"{row.speedup:.2f}x",
        "identical": row.identical,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; the exit status says whether every answer equals plain decoding's."""
    parser = report.new_parser("bench.serve.study", __doc__, result="result")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: 5")
    parser.add_argument(
        "--only",
        choices=[one.name for one in workloads()],
        metavar="NAME",
        help="measure one workload, without the changing stream and latency: %(choices)s",
    )
    given = parser.parse_args(argv)
    chosen = [one for one in workloads() if given.only in (None, one.name)]
    needed = dict.fromkeys(mode for one in chosen for mode in one.modes)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        checkpoints.random_drafter(folder / "random")
        servers = {mode: make_server(mode, folder, max(CONCURRENCIES)) for mode in needed}
        for server in servers.values():
            stack.enter_context(server)
        rows = rows_of(measure(servers, chosen, given.rounds))
        print(report.table(map(cells, rows), given.markdown))
        result["rows"] = rows
        if given.only is None:
            trained = {
                str(mode.block_size): server
                for mode, server in servers.items()
                if mode.mode == "dflash" and mode.drafter == TRAINED
            }
            by_width = {**trained, "1": servers[PLAIN]}
            result["stream"] = switch.measure(by_width, ADAPTIVE, given.rounds)
            result["latency"] = latency.measure(servers[PLAIN], servers[OURS], given.rounds)
    report.write_json(given, result)
    return int(not all(row.identical for row in rows))


if __name__ == "__main__":
    sys.exit(main())
