"""Results of a comparison of serving modes: rows, table, JSON, provenance."""

import importlib.metadata
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from launch import load
from launch.load import Load

ROOT = Path(__file__).resolve().parent.parent
PLAIN = "plain"


class Pass(NamedTuple):
    """One measured pass of one mode; `Load.answers` follow the order of the prompts."""

    mode: str  # plain, builtin (SGLang's own DFLASH worker) or dflash (ours)
    concurrency: int
    load: Load


class Row(NamedTuple):
    """One mode at one concurrency, over all rounds."""

    mode: str
    concurrency: int
    block_size: int  # counts the anchor; 1: no speculation
    tokens_per_s: float  # median of the rounds
    tau: float  # mean committed tokens per verify
    speedup: float  # of tokens_per_s over plain at the same concurrency
    identical: bool  # every answer of every round equals the reference


def summarize(
    passes: Sequence[Pass], reference: Load, block_sizes: Mapping[str, int]
) -> tuple[Row, ...]:
    """Rows in the order in which mode and concurrency first occur in `passes`.

    Args:
        passes: all measured passes; plain at every concurrency among them.
        reference: the answers that every pass must repeat token by token.
        block_sizes: block size of each mode.
    """
    rows = []
    for mode, concurrency in dict.fromkeys((p.mode, p.concurrency) for p in passes):
        loads = select(passes, mode, concurrency)
        speed = median_speed(loads)
        rows.append(
            Row(
                mode=mode,
                concurrency=concurrency,
                block_size=block_sizes[mode],
                tokens_per_s=speed,
                tau=load.tau(answer for one in loads for answer in one.answers),
                speedup=speed / median_speed(select(passes, PLAIN, concurrency)),
                identical=all(
                    load.first_difference(reference.answers, one.answers) is None for one in loads
                ),
            )
        )
    return tuple(rows)


def select(passes: Iterable[Pass], mode: str, concurrency: int) -> list[Load]:
    """The loads of one mode at one concurrency."""
    return [p.load for p in passes if (p.mode, p.concurrency) == (mode, concurrency)]


def median_speed(loads: Sequence[Load]) -> float:
    """Median tokens/s of several passes."""
    return statistics.median(one.tokens_per_s for one in loads)


def tau_by_family(passes: Iterable[Pass], mode: str, families: Sequence[str]) -> dict[str, float]:
    """Tau of a mode for each family of prompts; `families` names the family of each prompt."""
    loads = [p.load for p in passes if p.mode == mode]
    return {
        family: load.tau(
            answer
            for one in loads
            for answer, its_family in zip(one.answers, families, strict=True)
            if its_family == family
        )
        for family in dict.fromkeys(families)
    }


def table(rows: Sequence[Row], passes: Sequence[Pass]) -> str:
    """The rows as aligned text; tokens/s with the slowest and the fastest round."""
    head = ("mode", "concurrency", "block", "tokens/s", "min..max", "tau", "speed-up", "identical")
    body = []
    for row in rows:
        speeds = [one.tokens_per_s for one in select(passes, row.mode, row.concurrency)]
        body.append(
            (
                row.mode,
                str(row.concurrency),
                str(row.block_size),
                f"{row.tokens_per_s:.0f}",
                f"{min(speeds):.0f}..{max(speeds):.0f}",
                f"{row.tau:.2f}",
                f"{row.speedup:.2f}x",
                "yes" if row.identical else "NO",
            )
        )
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in (head, *body)
    )


def as_json(
    rows: Sequence[Row], passes: Sequence[Pass], families: Sequence[str], arguments: object
) -> dict[str, Any]:
    """The whole result: `rows` with the keys of `Row`, and what they rest on."""
    return {
        "rows": [row._asdict() for row in rows],
        "rounds": [
            {
                "mode": row.mode,
                "concurrency": row.concurrency,
                "tokens_per_s": [
                    one.tokens_per_s for one in select(passes, row.mode, row.concurrency)
                ],
            }
            for row in rows
        ],
        "tau_by_family": {
            mode: tau_by_family(passes, mode, families)
            for mode in dict.fromkeys(row.mode for row in rows)
        },
        "provenance": provenance(arguments),
    }


def provenance(arguments: object) -> dict[str, Any]:
    """Machine, versions, commit and time of a measurement."""
    packages = ("sglang", "torch", "transformers", "triton")
    return {
        "machine": {
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
            "system": platform.platform(),
            "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        },
        "versions": {
            "python": sys.version.split()[0],
            **{name: importlib.metadata.version(name) for name in packages},
        },
        "commit": commit(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "arguments": arguments,
    }


def cpu_name() -> str:
    """Model name of the first processor, from /proc/cpuinfo."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def commit() -> str | None:
    """The checkout's commit, with `-dirty` when files differ from it; None outside git."""
    command = ("git", "describe", "--always", "--dirty", "--abbrev=12", "--match=")
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
