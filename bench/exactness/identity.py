"""Greedy answers of many DFLASH servers against plain decoding, token for token, in float32.

    python -m bench.exactness identity --json result.json       # the whole matrix
    python -m bench.exactness identity --quick                   # two configurations, fewer prompts
    python -m bench.exactness identity --model hybrid            # the matrix of recurrent layers

Plain decoding answers all held-out prompts first, alone and eight at a time, and must agree with
itself. Then every configuration serves the same prompts at every concurrency; after each sweep the
server must be idle with every KV slot free or in the prefix tree, and every recurrent state too.
With recurrent layers, long answers and conversations follow (identity_recurrent.py). Exit status 1
if an answer differs, or if a conversation finds less in the prefix cache than with plain decoding
in a configuration for which docs/method/recurrent-state.md promises the same.
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench import report
from bench.exactness import identity_recurrent, identity_scripts
from bench.exactness.identity_recurrent import Repeat
from bench.exactness.identity_rows import MAX_NEW_TOKENS, Row, compare, show
from bench.harness import scripts
from bench.harness.configurations import Configuration, Drafter, Retraction
from bench.harness.servers import TestedServer, serve
from bench.progress import progress
from dflash_sglang import zoo
from launch import load
from launch.client import Answer
from launch.comparison import choose_prompts

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
    Configuration(16, 1, Drafter.ORACLE),
    Configuration(16, 16, Drafter.ADVERSARIAL, overlap=False),
)
# Recurrent layers: both ways to roll them back, every strategy of the prefix cache, pages, chunks,
# mixed batches, and boundaries so close that most answers cross some.
_HYBRID = Configuration(16, 1, model="hybrid", interval=64)
LAZY = "extra_buffer_lazy"
HYBRID_MATRIX = (
    _HYBRID,
    _HYBRID._replace(rollback="snapshot", strategy=LAZY),
    _HYBRID._replace(block_size=8, page_size=16, overlap=False, chunked=True),
    _HYBRID._replace(block_size=7, overlap=False, strategy="no_buffer", adaptive=True),
    _HYBRID._replace(chunked=True, mixed=True, retraction=Retraction.FORCED, adaptive=True),
    _HYBRID._replace(page_size=64, drafter=Drafter.RANDOM, retraction=Retraction.PRESSURE),
    _HYBRID._replace(strategy=LAZY, mixed=True, interval=256, window=True),
    _HYBRID._replace(radix=False, adaptive=True),
    _HYBRID._replace(drafter=Drafter.ORACLE),
    _HYBRID._replace(drafter=Drafter.ADVERSARIAL, page_size=16, overlap=False),
)
# Each of the strategies that keep states for the prefix cache, fixed and adaptive widths. With
# LAZY SGLang leaves out what ends near a boundary, where a verify may still write the kept state.
RECURRENT = (
    _HYBRID,
    _HYBRID._replace(page_size=16, overlap=False, adaptive=True),
    _HYBRID._replace(rollback="snapshot", strategy=LAZY),
    _HYBRID._replace(overlap=False, strategy="no_buffer", adaptive=True),
)
MATRICES = {"moe": MATRIX, "hybrid": HYBRID_MATRIX}
QUICK = {"moe": (MATRIX[0], MATRIX[7]), "hybrid": (HYBRID_MATRIX[0], HYBRID_MATRIX[2])}


class Reference(NamedTuple):
    """Answers of plain decoding."""

    answers: tuple[Answer, ...]
    continuations: tuple[scripts.Continuation, ...]  # beyond the answers, for scripted drafts


def serve_plain(
    configurations: Sequence[Configuration], prompts: Sequence[str], folder: Path
) -> tuple[Reference, Row]:
    """The reference of all configurations, and the row that compares it with prompts alone."""
    continuations: tuple[scripts.Continuation, ...] = ()
    with TestedServer(zoo.path(configurations[0].model).verifier, log_dir=folder) as plain:
        answers = load.run(plain, prompts, 8, MAX_NEW_TOKENS).answers
        alone = load.run(plain, prompts, 1, MAX_NEW_TOKENS)
        if any(configuration.scripted for configuration in configurations):
            continuations = scripts.continuations(plain, prompts, MAX_NEW_TOKENS)
    row = compare("plain, alone against 8", 1, answers, alone)
    return Reference(answers, continuations), row


def measure(
    configurations: Sequence[Configuration],
    concurrencies: Sequence[int],
    prompts: Sequence[str],
    folder: Path,
) -> list[Row]:
    """Serve and compare the matrix."""
    reference, row = serve_plain(configurations, prompts, folder / "plain")
    rows = [row]
    show(row)
    for number, configuration in enumerate(progress(configurations, unit="servers")):
        place, env = folder / str(number), {}
        if configuration.scripted:
            env = scripts.environment(place / "plugin", reference.continuations)
        with serve(configuration, place, env) as server:
            for concurrency in concurrencies:
                if configuration.scripted:
                    done = identity_scripts.run(
                        server, configuration, reference.continuations, concurrency
                    )
                else:
                    done = load.run(server, prompts, concurrency, MAX_NEW_TOKENS)
                server.check_idle()
                rows.append(compare(configuration.name, concurrency, reference.answers, done))
                show(rows[-1])
    return rows


def measure_recurrent(
    configurations: Sequence[Configuration], prompts: Sequence[str], folder: Path
) -> tuple[list[Row], list[Repeat]]:
    """Long answers and conversations."""
    rows: list[Row] = []
    repeats: list[Repeat] = []
    for number, configuration in enumerate(progress(configurations, unit="pairs of servers")):
        place = folder / f"recurrent-{number}"
        more, found = identity_recurrent.measure(configuration, place, prompts)
        rows += more
        repeats += found
    return rows, repeats


def main(argv: Sequence[str] | None = None) -> int:
    """Run the matrix; the exit status says whether every answer was identical."""
    parser = report.new_parser("bench.exactness.identity", __doc__)
    parser.add_argument("--model", choices=sorted(MATRICES), default="moe", help="default: moe")
    parser.add_argument("--quick", action="store_true", help="two configurations, 24 prompts")
    parser.add_argument("--prompts", type=int, default=300, metavar="N", help="default: 300")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32], metavar="N")
    given = parser.parse_args(argv)
    texts = [prompt.text for prompt in choose_prompts(given.model)]
    prompts = texts[: QUICK_PROMPTS if given.quick else given.prompts]
    begin = time.monotonic()
    matrix = (QUICK if given.quick else MATRICES)[given.model]
    recurrent = RECURRENT[: 1 if given.quick else None] if given.model == "hybrid" else ()
    with tempfile.TemporaryDirectory() as name:
        rows = measure(matrix, given.concurrency, prompts, Path(name))
        more, repeats = measure_recurrent(recurrent, prompts, Path(name))
    rows += more
    print(report.table((row._asdict() for row in rows), given.markdown))
    if repeats:
        print(report.table((repeat._asdict() for repeat in repeats), given.markdown))
    different = sum(row.prompts - row.identical for row in rows)
    different += sum(repeat.conversations - repeat.identical for repeat in repeats)
    keeping = {configuration.name for configuration in recurrent if configuration.strategy != LAZY}
    fewer = sum(repeat.fewer for repeat in repeats if repeat.configuration in keeping)
    print(
        f"{len(rows)} sweeps, {sum(row.prompts for row in rows)} answers, "
        f"{sum(row.tokens for row in rows)} tokens, "
        f"{sum(repeat.conversations for repeat in repeats)} turns of conversations, "
        f"{different} differences, {fewer} turns with less in the cache than plain decoding, "
        f"{time.monotonic() - begin:.0f} s"
    )
    given.prompts = len(prompts)
    report.write_json(given, {"rows": rows, "repeats": repeats})
    return int(different + fewer > 0)


if __name__ == "__main__":
    sys.exit(main())
