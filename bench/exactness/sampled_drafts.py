"""Which accept rule is fastest for sampled requests: argmax drafts that match, or sampled drafts.

    python -m bench.exactness sampled-drafts --json result.json
    python -m bench.exactness sampled-drafts --prompts 30 --rounds 1

Every server answers the same held-out prompts at every temperature. tau, mean committed tokens per
verify, comes with its standard error over prompts (delete-one jackknife of the ratio); tokens/s is
the median of the rounds.
"""

import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from bench import report
from bench.harness.requests import greedy, send_all
from bench.harness.servers import TestedServer, settings
from bench.progress import progress
from dflash_sglang import zoo
from launch.comparison import choose_prompts

TEMPERATURES = (0.6, 0.8, 1.0)
DRAFT_TEMPERATURES = (0.3, 0.6, 1.0)
CONCURRENCY = 8
NEW_TOKENS = 96
RULES = {
    "match": (),
    "token-wise": ("--speculative-use-rejection-sampling",),
    "block": ("--speculative-use-block-verification",),
}


class Row(NamedTuple):
    """One rule at one temperature."""

    rule: str
    draft_temperature: float | None  # None: argmax drafts
    temperature: float
    tau: float
    tau_se: float
    tokens_per_s: float
    tokens_per_s_range: tuple[float, float]


class Counted(NamedTuple):
    """All answers to one prompt."""

    tokens: int  # without the first one, which comes from prefill
    verifies: int


def ratio_with_error(counted: Sequence[Counted]) -> tuple[float, float]:
    """Tokens per verify over all prompts, and its jackknife standard error."""
    tokens, verifies = (sum(column) for column in zip(*counted, strict=True))
    without = [(tokens - one.tokens) / (verifies - one.verifies) for one in counted]
    mean, n = statistics.fmean(without), len(without)
    error = math.sqrt((n - 1) / n * sum((value - mean) ** 2 for value in without))
    return tokens / verifies, error


def measure_server(
    server: TestedServer,
    rule: str,
    draft_temperature: float | None,
    prompts: Sequence[str],
    rounds: int,
    bar: Any,
) -> list[Row]:
    """One row a temperature."""
    rows = []
    for temperature in TEMPERATURES:
        payloads = [greedy(prompt, NEW_TOKENS, temperature=temperature) for prompt in prompts]
        counted = [Counted(0, 0)] * len(prompts)
        rates = []
        for _ in range(rounds):
            server.flush()
            begin = time.perf_counter()
            answers = send_all(server, payloads, CONCURRENCY)
            seconds = time.perf_counter() - begin
            meta = [answer["meta_info"] for answer in answers]
            rates.append(sum(one["completion_tokens"] for one in meta) / seconds)
            counted = [
                Counted(
                    old.tokens + one["completion_tokens"] - 1,
                    old.verifies + one.get("spec_verify_ct", 0),
                )
                for old, one in zip(counted, meta, strict=True)
            ]
            bar.update()
        tau, error = ratio_with_error([one for one in counted if one.verifies])
        spread = (round(min(rates), 1), round(max(rates), 1))
        rate = round(statistics.median(rates), 1)
        row = Row(
            rule, draft_temperature, temperature, round(tau, 3), round(error, 3), rate, spread
        )
        rows.append(row)
        tqdm.write("  ".join(f"{name} {value}" for name, value in cells(row).items()))
    return rows


def cells(row: Row) -> dict[str, object]:
    """A line of the table."""
    low, high = row.tokens_per_s_range
    return {
        "rule": row.rule,
        "drafts": "argmax" if row.draft_temperature is None else f"T {row.draft_temperature}",
        "temperature": row.temperature,
        "tau": f"{row.tau:.3f} +- {row.tau_se:.3f}",
        "tokens/s": f"{row.tokens_per_s:.0f} ({low:.0f}..{high:.0f})",
    }


def measure(prompts: Sequence[str], rounds: int) -> list[Row]:
    """All rules."""
    pair = zoo.path("moe")
    cases: list[tuple[str, float | None]] = [("match", None)]
    cases += [(r, t) for r in ("token-wise", "block") for t in DRAFT_TEMPERATURES]
    rows: list[Row] = []
    total = len(cases) * len(TEMPERATURES) * rounds
    with tempfile.TemporaryDirectory() as name, progress(unit="rounds", total=total) as bar:
        for index, (rule, draft_temperature) in enumerate(cases):
            folder = Path(name) / str(index)
            chosen: dict[str, object] = {"width": "fixed"}
            if draft_temperature is not None:
                chosen["draft_temperature"] = draft_temperature
            args = [*RULES[rule], "--disable-overlap-schedule"]
            args += settings(folder / "settings.json", **chosen)
            with TestedServer(pair.verifier, pair.drafter, args=args, log_dir=folder) as server:
                rows += measure_server(server, rule, draft_temperature, prompts, rounds, bar)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every rule."""
    parser = report.new_parser("bench.exactness.sampled_drafts", __doc__)
    parser.add_argument("--prompts", type=int, default=150, metavar="N", help="default: 150")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default: 3")
    given = parser.parse_args(argv)
    texts = [prompt.text for prompt in choose_prompts("moe")]
    rows = measure(texts[: given.prompts], given.rounds)
    print(report.table(map(cells, rows), given.markdown))
    report.write_json(given, {"rows": rows}, concurrency=CONCURRENCY)
    return 0


if __name__ == "__main__":
    sys.exit(main())
