"""Serving speed with the verify width adaptive and fixed, beside plain decoding and SGLang's own.

    python -m bench.serve.study --json docs/data/width.json
    python -m bench.serve.study --rounds 1 --only random        # one workload

All servers stay up and take turns, workload by workload and round by round, so that a busy minute
of the machine hits every one of them; waiting servers sleep. Every answer is compared with plain
decoding's. Exit status 1 when one differs. The environment is that of ``. launch/env.sh``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from bench.harness import checkpoints
from bench.serve import latency as serve_latency
from bench.serve import switch as serve_switch
from dflash_sglang import cpu, zoo
from launch import load
from launch.comparison import choose_prompts
from launch.report import provenance
from launch.serving import Server

# Concurrency to prompts of a pass: some seconds of plain decoding, most of them at full load.
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
    block_size: int | str  # of ours the verify width; 1: no speculation


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
    """Prompts, and who answers them at which concurrency."""

    name: str
    prompts: Sequence[str]  # the first `PROMPTS` of them in each pass, or all
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
    """What is measured."""
    mixed = [prompt.text for prompt in choose_prompts("moe", max(PROMPTS.values()))]
    pairs = zip(*(zoo.prompts("moe")[family] for family in LOW), strict=True)
    low = [prompt.text for pair in pairs for prompt in pair]
    trained = [mode for mode in MODES if mode.drafter != RANDOM]
    ours = [mode for mode in trained if mode.mode != "builtin"]
    useless = [PLAIN, *(mode for mode in MODES if mode.drafter == RANDOM)]
    return [
        Workload("all families", mixed, trained),
        Workload("low acceptance", low, ours),
        Workload("random", mixed, useless),
    ]


def make_server(mode: Mode, folder: Path, max_running: int) -> Server:
    """The same limits for all, so that only the worker differs."""
    args = ["--max-running-requests", str(max_running), "--max-total-tokens", "16384"]
    args += ["--min-free-slots-delay", "1"]
    if cpu.activate() is not None:
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
        settings = {} if mode.block_size == ADAPTIVE else {"width": "fixed"}
        if mode.block_size not in (ADAPTIVE, 16):
            settings["max_width"] = mode.block_size
        file = folder / f"{mode.drafter}-{mode.block_size}.json"
        file.write_text(json.dumps(settings))
        args += ["--speculative-adaptive-config", str(file)]
    return Server(zoo.path("moe").verifier, drafter, args=args, env=env)


Passes = dict[tuple[str, Mode, int], list[load.Load]]


def measure(servers: Mapping[Mode, Server], chosen: Sequence[Workload], rounds: int) -> Passes:
    """All passes; those of a round follow one another."""
    passes: Passes = defaultdict(list)
    total = rounds * sum(len(one.modes) * len(CONCURRENCIES) for one in chosen)
    with tqdm(total=total, unit=" passes") as bar:
        for workload in chosen:
            for number in range(1 + rounds):  # one to warm up
                for concurrency in CONCURRENCIES:
                    count = PROMPTS[concurrency] if number else concurrency
                    prompts = workload.prompts[:count]
                    for mode in workload.modes:
                        done = load.run(servers[mode], prompts, concurrency, MAX_NEW_TOKENS)
                        if number:
                            passes[workload.name, mode, concurrency].append(done)
                            bar.update()
    return passes


def rows_of(passes: Passes) -> list[Row]:
    """Medians, and speed-ups over the plain pass of the same round."""
    rows = []
    for (workload, mode, concurrency), loads in passes.items():
        plain = passes[workload, PLAIN, concurrency]
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


def show(rows: Sequence[Row]) -> None:
    """Print the rows as Markdown."""
    head = "workload, mode, drafter, c, width, tokens/s (min..max), tau, speed-up, identical"
    print("| " + head.replace(", ", " | ") + " |")
    print("|---" * (head.count(", ") + 1) + "|")
    for row in rows:
        spread = f"{min(row.tokens_per_s_rounds):.0f}..{max(row.tokens_per_s_rounds):.0f}"
        print(
            f"| {row.workload} | {row.mode} | {row.drafter} | {row.concurrency} | {row.block_size} "
            f"| {row.tokens_per_s:.0f} ({spread}) | {row.tau:.2f} | {row.speedup:.2f}x "
            f"| {'yes' if row.identical else 'NO'} |"
        )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench.serve.study", description="See the module.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: 5")
    parser.add_argument("--only", metavar="NAME", help="one workload, without stream and latency")
    return parser.parse_args(argv)


def main() -> int:
    """Measure; the exit status says whether every answer was plain decoding's."""
    given = parse()
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
        show(rows)
        result["rows"] = [row._asdict() for row in rows]
        if given.only is None:
            fixed = {
                m: s for m, s in servers.items() if m.mode == "dflash" and m.drafter == TRAINED
            }
            named = {str(mode.block_size): server for mode, server in fixed.items()}
            named["1"] = servers[PLAIN]
            result["stream"] = serve_switch.measure(named, ADAPTIVE, given.rounds)
            result["latency"] = serve_latency.measure(servers[PLAIN], servers[OURS], given.rounds)
    if given.json is not None:
        result.update(provenance({"rounds": given.rounds}))
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(not all(row.identical for row in rows))


if __name__ == "__main__":
    sys.exit(main())
