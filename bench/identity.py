"""Greedy answers of many DFLASH servers against plain decoding, token for token, in float32.

    python -m bench.identity --json result.json       # the whole matrix
    python -m bench.identity --quick                   # two configurations, fewer prompts
    python -m bench.identity --model hybrid            # the matrix of recurrent layers

Plain decoding answers all held-out prompts first, alone and eight at a time, and must agree with
itself. Then every configuration serves the same prompts at every concurrency; after each pass the
server must be idle with every KV slot free or in the prefix tree. Exit status 1 when an answer
differs. The environment is that of ``. launch/env.sh``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from dflash_sglang import zoo
from launch import load
from launch.client import Answer
from launch.comparison import choose_prompts
from launch.report import provenance
from tests.e2e.configurations import Configuration, Drafter, Retraction
from tests.e2e.servers import TestedServer, serve

MAX_NEW_TOKENS = 192
QUICK_PROMPTS = 24
# Every value of every axis, and each risky pair at least once: pages with chunks and windows,
# retraction with and without overlap, mixed batches with sliding layers, no prefix cache.
MATRIX = (
    Configuration(16, 1),
    Configuration(8, 16, overlap=False),
    Configuration(4, 1, overlap=False, radix=False),
    Configuration(16, 16, chunked=True, radix=False),
    Configuration(8, 1, chunked=True, mixed=True),
    Configuration(4, 16, chunked=True, window=True),
    Configuration(16, 1, retraction=Retraction.FORCED),
    Configuration(16, 16, overlap=False, retraction=Retraction.FORCED),
    Configuration(16, 1, Drafter.RANDOM),
    Configuration(8, 16, Drafter.RANDOM, overlap=False, retraction=Retraction.PRESSURE),
    Configuration(16, 1, Drafter.SLIDING, overlap=False, mixed=True, chunked=True),
    Configuration(16, 1, adaptive=True),
    Configuration(16, 16, Drafter.RANDOM, overlap=False, chunked=True, adaptive=True),
)
# Recurrent layers: both ways to roll them back, every strategy of the prefix cache, pages, chunks,
# mixed batches, and boundaries so close that most answers cross some.
_HYBRID = Configuration(16, 1, model="hybrid", interval=64)
HYBRID_MATRIX = (
    _HYBRID,
    _HYBRID._replace(rollback="snapshot", strategy="extra_buffer_lazy"),
    _HYBRID._replace(block_size=8, page_size=16, overlap=False, chunked=True),
    _HYBRID._replace(block_size=7, overlap=False, strategy="no_buffer", adaptive=True),
    _HYBRID._replace(chunked=True, mixed=True, retraction=Retraction.FORCED, adaptive=True),
    _HYBRID._replace(page_size=64, drafter=Drafter.RANDOM, retraction=Retraction.PRESSURE),
    _HYBRID._replace(strategy="extra_buffer_lazy", mixed=True, interval=256, window=True),
    _HYBRID._replace(radix=False, adaptive=True),
)
MATRICES = {"moe": MATRIX, "hybrid": HYBRID_MATRIX}
QUICK = {"moe": (MATRIX[0], MATRIX[7]), "hybrid": (HYBRID_MATRIX[0], HYBRID_MATRIX[2])}


class Row(NamedTuple):
    """One configuration at one concurrency."""

    configuration: str
    concurrency: int
    prompts: int
    identical: int
    tokens: int
    verifies: int
    tau: float
    retractions: int
    seconds: float


def compare(
    name: str, concurrency: int, expected: Sequence[Answer], done: load.Load, prompts: Sequence[str]
) -> Row:
    """One row; the first difference goes to standard error."""
    same = sum(a.output_ids == b.output_ids for a, b in zip(expected, done.answers, strict=True))
    difference = load.first_difference(expected, done.answers)
    if difference is not None:
        tqdm.write(
            f"{name} at concurrency {concurrency}: {prompts[difference.prompt]!r} differs at token "
            f"{difference.position}: {difference.expected} became {difference.got}",
            file=sys.stderr,
        )
    return Row(
        configuration=name,
        concurrency=concurrency,
        prompts=len(prompts),
        identical=same,
        tokens=sum(answer.completion_tokens for answer in done.answers),
        verifies=sum(answer.verify_count for answer in done.answers),
        tau=round(load.tau(done.answers), 3),
        retractions=sum(answer.meta["num_retractions"] for answer in done.answers),
        seconds=round(done.seconds, 1),
    )


def show(row: Row) -> None:
    """Print a row."""
    tqdm.write(
        f"{row.configuration:<45} c={row.concurrency:<3} {row.identical}/{row.prompts} identical, "
        f"tau {row.tau:.2f}, {row.verifies} verifies, {row.retractions} retractions, "
        f"{row.seconds:.0f} s"
    )


def measure(
    configurations: Sequence[Configuration], concurrencies: Sequence[int], prompts: Sequence[str]
) -> list[Row]:
    """Serve and compare everything."""
    rows: list[Row] = []
    passes = len(configurations) * len(concurrencies) + 2
    with tempfile.TemporaryDirectory() as name, tqdm(total=passes, unit=" passes") as bar:
        folder = Path(name)
        verifier = zoo.path(configurations[0].model).verifier
        with TestedServer(verifier, log_dir=folder / "plain") as plain:
            expected = load.run(plain, prompts, 8, MAX_NEW_TOKENS).answers
            bar.update()
            alone = load.run(plain, prompts, 1, MAX_NEW_TOKENS)
            rows.append(compare("plain, alone against 8", 1, expected, alone, prompts))
            bar.update()
        show(rows[-1])
        for number, configuration in enumerate(configurations):
            bar.set_description(configuration.name)
            with serve(configuration, folder / str(number)) as server:
                for concurrency in concurrencies:
                    done = load.run(server, prompts, concurrency, MAX_NEW_TOKENS)
                    server.check_rest()
                    rows.append(compare(configuration.name, concurrency, expected, done, prompts))
                    show(rows[-1])
                    bar.update()
    return rows


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench.identity", description="See the module.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--model", choices=sorted(MATRICES), default="moe")
    parser.add_argument("--quick", action="store_true", help="two configurations, 24 prompts")
    parser.add_argument("--prompts", type=int, default=300, metavar="N", help="default: 300")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32], metavar="N")
    return parser.parse_args(argv)


def main() -> int:
    """Run the matrix; the exit status says whether every answer was identical."""
    given = parse()
    texts = [prompt.text for prompt in choose_prompts(given.model)]
    prompts = texts[: QUICK_PROMPTS if given.quick else given.prompts]
    begin = time.monotonic()
    matrix = (QUICK if given.quick else MATRICES)[given.model]
    rows = measure(matrix, given.concurrency, prompts)
    different = sum(row.prompts - row.identical for row in rows)
    print(
        f"{len(rows)} passes, {sum(row.prompts for row in rows)} answers, "
        f"{sum(row.tokens for row in rows)} tokens, {different} differences, "
        f"{time.monotonic() - begin:.0f} s"
    )
    if given.json is not None:
        arguments = {
            "model": given.model,
            "prompts": len(prompts),
            "concurrency": given.concurrency,
        }
        result: dict[str, Any] = {"rows": [row._asdict() for row in rows], **provenance(arguments)}
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
