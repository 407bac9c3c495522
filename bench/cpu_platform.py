"""Tokens/s of this CPU platform against another one that serves the same pair, in the same run.

    python -m bench.cpu_platform --prototype FOLDER --json result.json

FOLDER holds an earlier out-of-tree platform with a `pyproject.toml` that names its entry points; it
need not be installed. The servers of a mode stay up together and take turns, pass by pass, so that
a busy minute of the machine hits all of them. Beside tokens/s, the CPU time that the scheduler
process used per token is reported, which other processes on the machine do not lengthen.

Modes: plain decoding, and DFLASH with SGLang's own worker on both platforms and with the worker of
this package on ours. Every answer is compared with the first server's. Before measuring, the tests
of the platform run; `--no-tests` skips them.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from dflash_sglang import zoo
from launch import load
from launch.comparison import MAX_NEW_TOKENS, choose_prompts, say
from launch.report import provenance
from launch.serving import Server

ROOT = Path(__file__).resolve().parents[1]
PLATFORMS, PLUGINS = "sglang.srt.platforms", "sglang.srt.plugins"
OURS, OTHER = "ours", "prototype"


class Contestant(NamedTuple):
    """One server to measure."""

    platform: str
    mode: str  # plain, builtin or dflash
    env: Mapping[str, str]


class Measured(NamedTuple):
    """One pass of one server over the prompts."""

    contestant: Contestant
    concurrency: int
    result: load.Load
    cpu_s: float  # CPU time of the scheduler process, which other processes do not lengthen

    @property
    def cpu_ms_per_token(self) -> float:
        """Scheduler CPU time per generated token."""
        tokens = sum(answer.completion_tokens for answer in self.result.answers)
        return 1e3 * self.cpu_s / tokens


def main() -> int:
    """Measure, print the table, write the JSON; 1 when an answer differs."""
    options = parse_options()
    if options.tests:
        tests = [sys.executable, "-P", "-m", "pytest", "-q", "tests/cpu"]
        subprocess.run(tests, cwd=ROOT, check=True)
    with tempfile.TemporaryDirectory() as overlay:
        other = environment_of(options.prototype, Path(overlay))
        ours = {"SGLANG_PLATFORM": "dflash_cpu"}
        groups = [
            [Contestant(OTHER, "plain", other), Contestant(OURS, "plain", ours)],
            [
                Contestant(OTHER, "builtin", other),
                Contestant(OURS, "builtin", {**ours, "DFLASH_SGLANG_WORKER": "builtin"}),
                Contestant(OURS, "dflash", ours),
            ],
        ]
        prompts = [prompt.text for prompt in choose_prompts("moe", options.prompts)]
        passes = [done for group in groups for done in measure(group, prompts, options)]
    rows = list(summarise(passes))
    report = {"rows": rows, "provenance": provenance(sys.argv[1:])}
    print(as_table(report))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row["identical"] for row in rows) else 1


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prototype", type=Path, required=True, help="folder of the other one")
    parser.add_argument("--rounds", type=int, default=3, help="passes of each server")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--block-size", type=int, default=16, help="counts the anchor")
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--no-tests", dest="tests", action="store_false", help="measure at once")
    return parser.parse_args()


def environment_of(folder: Path, overlay: Path) -> dict[str, str]:
    """Variables that make SGLang find a platform which is not installed, and no other.

    Args:
        folder: has `pyproject.toml` and the package beside it.
        overlay: an empty folder; gets the metadata from which entry points are discovered.

    Returns:
        `PYTHONPATH` and `SGLANG_PLATFORM`, which also keeps other platforms' plugins out.
    """
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    points = project["entry-points"]
    info = overlay / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(head, encoding="utf-8")
    lines = []
    for group in (PLATFORMS, PLUGINS):
        lines += [f"[{group}]", *map(" = ".join, points.get(group, {}).items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    path = [str(overlay), str(folder.resolve()), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "SGLANG_PLATFORM": next(iter(points[PLATFORMS])),
    }


def measure(
    group: Sequence[Contestant], prompts: Sequence[str], options: argparse.Namespace
) -> Iterator[Measured]:
    """Start the servers of a group, warm them up, and let them take turns."""
    pair = zoo.path("moe")
    most = max(options.concurrency)
    with ExitStack() as stack:
        servers: list[tuple[Contestant, Server]] = []
        for contestant in group:
            args = ["--max-running-requests", str(most)]
            drafter = None if contestant.mode == "plain" else pair.drafter
            if drafter:
                args += ["--speculative-dflash-block-size", str(options.block_size)]
            say(f"starting {contestant.platform} {contestant.mode}")
            server = Server(pair.verifier, drafter, args=args, env=contestant.env)
            servers.append((contestant, stack.enter_context(server)))
            load.run(server, prompts[:most], most, MAX_NEW_TOKENS)
        for number, concurrency in itertools.product(range(options.rounds), options.concurrency):
            for contestant, server in servers:
                before = scheduler_cpu_s(server)
                result = load.run(server, prompts, concurrency, MAX_NEW_TOKENS)
                cpu_s = scheduler_cpu_s(server) - before
                done = Measured(contestant, concurrency, result, cpu_s)
                say(
                    f"round {number + 1}, {concurrency} at a time, {contestant.platform} "
                    f"{contestant.mode}: {result.tokens_per_s:.0f} tokens/s, "
                    f"{done.cpu_ms_per_token:.2f} ms of CPU a token"
                )
                yield done


def scheduler_cpu_s(server: Server) -> float:
    """CPU time that the scheduler process of a server has used so far."""
    for process in psutil.Process(server.pid).children(recursive=True):
        if "scheduler" in " ".join(process.cmdline()):
            times = process.cpu_times()
            return float(times.user + times.system)
    raise RuntimeError(f"the server with pid {server.pid} has no scheduler process")


def summarise(passes: Sequence[Measured]) -> Iterator[dict[str, Any]]:
    """One row per server and concurrency, with its ratios to the prototype in the same mode.

    Our own worker is compared with the prototype's DFLASH, which SGLang's worker serves.
    """
    grouped: dict[tuple[str, str, int], list[Measured]] = {}
    for done in passes:
        key = (done.contestant.platform, done.contestant.mode, done.concurrency)
        grouped.setdefault(key, []).append(done)
    reference = passes[0].result.answers
    for (platform, mode, concurrency), own in grouped.items():
        base = grouped[OTHER, "plain" if mode == "plain" else "builtin", concurrency]
        speeds = [done.result.tokens_per_s for done in own]
        answers = [done.result.answers for done in own]
        yield {
            "platform": platform,
            "mode": mode,
            "concurrency": concurrency,
            "tokens_per_s": statistics.median(speeds),
            "spread": [min(speeds), max(speeds)],
            "times_prototype": statistics.median(speeds)
            / statistics.median(done.result.tokens_per_s for done in base),
            "cpu_ms_per_token": statistics.median(done.cpu_ms_per_token for done in own),
            "cpu_times_less": statistics.median(done.cpu_ms_per_token for done in base)
            / statistics.median(done.cpu_ms_per_token for done in own),
            "tau": load.tau(answers[0]),
            "identical": all(load.first_difference(reference, one) is None for one in answers),
        }


def as_table(report: Mapping[str, Any]) -> str:
    """The rows, below the machine and the versions."""
    lines = [f"{key}: {value}" for key, value in report["provenance"].items()]
    columns = (
        "platform",
        "mode",
        "at a time",
        "tokens/s",
        "spread",
        "times prototype",
        "CPU ms/token",
        "times less",
        "tau",
    )
    lines.append(f"| {' | '.join(columns)} | identical |")
    lines.append(f"{'|---' * (len(columns) + 1)}|")
    for row in report["rows"]:
        low, high = row["spread"]
        lines.append(
            f"| {row['platform']} | {row['mode']} | {row['concurrency']} "
            f"| {row['tokens_per_s']:.0f} | {low:.0f} to {high:.0f} "
            f"| {row['times_prototype']:.2f} | {row['cpu_ms_per_token']:.2f} "
            f"| {row['cpu_times_less']:.2f} | {row['tau']:.2f} "
            f"| {'yes' if row['identical'] else 'NO'} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
