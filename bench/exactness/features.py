"""Every sampling feature of DFLASH servers against plain decoding, ours and SGLang's own.

    python -m bench.exactness.features --json result.json    # 24 prompts a feature
    python -m bench.exactness.features --prompts 6

Plain decoding answers one request at a time, without overlap: that is what a feature means. Our
worker then answers each feature on its own and all features at once; SGLang's own worker answers
each on its own, and only where its server accepts the request. Sampled features go by seed, so all
comparisons are token for token, log-probabilities up to rounding. Exit status 1 when ours differs.
The environment is that of ``. launch/env.sh``.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from bench.harness.features import ARGS, FEATURES, PLAIN_ARGS, Feature, same
from bench.harness.requests import ask
from bench.harness.servers import TestedServer
from dflash_sglang import zoo
from dflash_sglang.config import WORKER_VARIABLE, WorkerChoice
from launch.client import Client
from launch.comparison import choose_prompts
from launch.report import provenance

CONCURRENCY = 24
DFLASH, MIXED, BUILTIN = "dflash", "dflash-mixed", "builtin"


class Job(NamedTuple):
    """One request."""

    feature: Feature
    number: int  # of the prompt
    prompt: str


class Row(NamedTuple):
    """How many answers to a feature were those of plain decoding."""

    mode: str
    feature: str
    same: int
    total: int


Answers = dict[tuple[str, int], Any]


def run(server: Client, jobs: Sequence[Job], concurrency: int, bar: Any) -> Answers:
    """The answers by feature and prompt."""

    def send(job: Job) -> Any:
        answer = ask(server, job.feature.payload(job.prompt, job.number), job.feature.path)
        bar.update()
        return answer

    with ThreadPoolExecutor(concurrency) as pool:
        answers = list(pool.map(send, jobs))
    return {(job.feature.name, job.number): a for job, a in zip(jobs, answers, strict=True)}


def compare(mode: str, expected: Answers, got: Answers) -> list[Row]:
    """A row a feature."""
    rows = []
    for feature in FEATURES:
        pairs = [(answer, got[key]) for key, answer in expected.items() if key[0] == feature.name]
        equal = sum(same(left, right) for left, right in pairs)
        rows.append(Row(mode, feature.name, equal, len(pairs)))
    return rows


@contextmanager
def serving(folder: Path, mode: str) -> Iterator[TestedServer]:
    """The server of a mode."""
    pair = zoo.path("moe")
    drafter = None if mode == "plain" else pair.drafter
    args = PLAIN_ARGS if mode == "plain" else ARGS
    env = {WORKER_VARIABLE: WorkerChoice.BUILTIN.value} if mode == BUILTIN else {}
    with TestedServer(pair.verifier, drafter, args=args, env=env, log_dir=folder / mode) as server:
        yield server


def measure(prompts: Sequence[str]) -> list[Row]:
    """All modes."""
    jobs = [
        Job(feature, number, prompt)
        for feature in FEATURES
        for number, prompt in enumerate(prompts)
    ]
    shuffled = random.Random(0).sample(jobs, len(jobs))
    with (
        tempfile.TemporaryDirectory() as name,
        tqdm(total=4 * len(jobs), unit=" requests") as bar,
    ):
        folder = Path(name)
        bar.set_description("plain")
        with serving(folder, "plain") as server:
            expected = run(server, jobs, 1, bar)
        bar.set_description(DFLASH)
        with serving(folder, DFLASH) as server:
            # In the order of features: a batch holds one feature, at times two.
            rows = compare(DFLASH, expected, run(server, jobs, CONCURRENCY, bar))
            rows += compare(MIXED, expected, run(server, shuffled, CONCURRENCY, bar))
            server.check_rest()
        bar.set_description(BUILTIN)
        with serving(folder, BUILTIN) as server:
            rows += compare(BUILTIN, expected, run(server, jobs, CONCURRENCY, bar))
    return rows


def table(rows: Sequence[Row]) -> str:
    """The matrix as Markdown, a line a feature."""
    by_mode: Mapping[tuple[str, str], Row] = {(row.mode, row.feature): row for row in rows}
    lines = [
        "| feature | ours | ours, all mixed | SGLang's own worker |",
        "|---|---|---|---|",
    ]
    for feature in FEATURES:
        cells = [by_mode[mode, feature.name] for mode in (DFLASH, MIXED, BUILTIN)]
        shown = " | ".join(f"{row.same} of {row.total}" for row in cells)
        lines.append(f"| {feature.name} | {shown} |")
    return "\n".join(lines)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench.exactness.features", description="See the module.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--prompts", type=int, default=24, metavar="N", help="default: 24")
    return parser.parse_args(argv)


def main() -> int:
    """Run the matrix; the exit status says whether every answer of ours was plain decoding's."""
    given = parse()
    texts = [prompt.text for prompt in choose_prompts("moe")]
    begin = time.monotonic()
    rows = measure(texts[: given.prompts])
    print(table(rows))
    different = sum(row.total - row.same for row in rows if row.mode != BUILTIN)
    print(
        f"{len(FEATURES)} features, {different} differences in ours, "
        f"{time.monotonic() - begin:.0f} s"
    )
    if given.json is not None:
        result: dict[str, Any] = {
            "rows": [row._asdict() for row in rows],
            **provenance({"prompts": given.prompts}),
        }
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
