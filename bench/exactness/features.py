"""Every sampling feature of DFLASH servers against plain decoding: our worker and SGLang's own.

    python -m bench.exactness features --json result.json    # 24 prompts a feature
    python -m bench.exactness features --prompts 6

Plain decoding, one request at a time and without overlap, defines the right answers. Our worker
then serves each feature alone and all features mixed; SGLang's own worker serves each alone, where
its server accepts the request. Sampled requests have seeds, so that all comparisons are token for
token, log-probabilities up to rounding. Exit status 1 if an answer of our worker differs.
"""

import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bench import report
from bench.harness.features import ARGS, FEATURES, PLAIN_ARGS, Feature, same
from bench.harness.requests import send
from bench.harness.servers import TestedServer
from bench.progress import progress
from dflash_sglang import zoo
from dflash_sglang.config import WORKER_VARIABLE, WorkerChoice
from launch.client import Client
from launch.comparison import choose_prompts

CONCURRENCY = 24
DFLASH, MIXED, BUILTIN = "dflash", "dflash-mixed", "builtin"


class Job(NamedTuple):
    """One request."""

    feature: Feature
    number: int  # of the prompt
    prompt: str


class Row(NamedTuple):
    """How many answers to a feature's requests equal plain decoding's."""

    mode: str
    feature: str
    same: int
    total: int


Answers = dict[tuple[str, int], Any]


def run(server: Client, jobs: Sequence[Job], concurrency: int, bar: Any) -> Answers:
    """The answers by feature and prompt."""

    def answer_to(job: Job) -> Any:
        answer = send(server, job.feature.payload(job.prompt, job.number), job.feature.path)
        bar.update()
        return answer

    with ThreadPoolExecutor(concurrency) as pool:
        answers = list(pool.map(answer_to, jobs))
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
        progress(unit="requests", total=4 * len(jobs)) as bar,
    ):
        folder = Path(name)
        bar.set_description("plain")
        with serving(folder, "plain") as server:
            expected = run(server, jobs, 1, bar)
        bar.set_description(DFLASH)
        with serving(folder, DFLASH) as server:
            # In the order of features: a batch holds requests of one feature, sometimes two.
            rows = compare(DFLASH, expected, run(server, jobs, CONCURRENCY, bar))
            rows += compare(MIXED, expected, run(server, shuffled, CONCURRENCY, bar))
            server.check_idle()
        bar.set_description(BUILTIN)
        with serving(folder, BUILTIN) as server:
            rows += compare(BUILTIN, expected, run(server, jobs, CONCURRENCY, bar))
    return rows


def by_feature(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    """The lines of the table: one a feature, a column a mode."""
    cells = {(row.mode, row.feature): f"{row.same} of {row.total}" for row in rows}
    for feature in FEATURES:
        yield {
            "feature": feature.name,
            "ours": cells[DFLASH, feature.name],
            "ours, all mixed": cells[MIXED, feature.name],
            "SGLang's own worker": cells[BUILTIN, feature.name],
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the matrix; the exit status says whether all our answers equal plain decoding's."""
    parser = report.new_parser("bench.exactness.features", __doc__)
    parser.add_argument("--prompts", type=int, default=24, metavar="N", help="default: 24")
    given = parser.parse_args(argv)
    texts = [prompt.text for prompt in choose_prompts("moe")]
    begin = time.monotonic()
    rows = measure(texts[: given.prompts])
    print(report.table(by_feature(rows), given.markdown))
    different = sum(row.total - row.same for row in rows if row.mode != BUILTIN)
    print(
        f"{len(FEATURES)} features, {different} differences in ours, "
        f"{time.monotonic() - begin:.0f} s"
    )
    report.write_json(given, {"rows": rows})
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
