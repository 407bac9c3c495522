"""Sampled answers of a server against the verifier distribution, for every accept rule.

    python -m bench.exactness draws --json result.json    # 20,100 draws a rule
    python -m bench.exactness draws --draws 3000

The expected distribution comes from transformers, without SGLang and without speculation: the
probability of every continuation of a context. A chi-square test compares it with the server's
draws. Rules with a planted bug go through the same test, which must reject them, and so must the
relaxed rule, which is not exact. Exit status 1 if a verdict is not the expected one.
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from bench import report
from bench.harness import scripts
from bench.harness.draw_tests import (
    BATCH,
    BLOCK_ARGS,
    REJECT,
    Sampling,
    context,
    distribution,
    draw,
    p_value,
)
from bench.harness.servers import TestedServer, settings
from bench.harness.verifier_distribution import ReferenceModel
from bench.progress import progress
from dflash_sglang import zoo

TOKEN_WISE = ("--speculative-use-rejection-sampling",)
BLOCK = ("--speculative-use-block-verification",)
FEWER = 3000
FILTERS = {
    "temperature": Sampling(),
    "top-k and top-p": Sampling(top_k=6, top_p=0.9),
    "min-p": Sampling(min_p=0.02),
}


class Case(NamedTuple):
    """One server."""

    rule: str
    flags: tuple[str, ...]
    exact: bool
    bug: str | None = None  # planted, see bench/harness/server_side/wrong_rules.py


CASES = (
    Case("sample and match", (), exact=True),
    Case("token-wise rejection", TOKEN_WISE, exact=True),
    Case("block verification", BLOCK, exact=True),
    Case("relaxed, acc 0.5", ("--speculative-accept-threshold-acc", "0.5"), exact=False),
    Case("match that accepts every draft", (), exact=False, bug="always"),
    Case("token-wise, bonus from p", TOKEN_WISE, exact=False, bug="bonus"),
    Case("block, bonus from p", BLOCK, exact=False, bug="bonus"),
)


class Row(NamedTuple):
    """One rule under one kind of filter."""

    rule: str
    filters: str
    draws: int
    p_value: float
    tau: float
    rejected: bool
    as_expected: bool


def measure(number: int) -> list[Row]:
    """Every rule; the exact ones under every filter."""
    model = ReferenceModel()
    ids = context(model)
    expected = {name: distribution(model, ids, sampling) for name, sampling in FILTERS.items()}
    total = sum(len(FILTERS) if case.exact else 1 for case in CASES)
    rows = []
    with tempfile.TemporaryDirectory() as name, progress(unit="tests", total=total) as bar:
        for index, case in enumerate(CASES):
            folder = Path(name) / str(index)
            env, options = {}, {}
            if case.bug is not None:
                env = scripts.plugin_environment(folder / "plugin", "wrong_rules")
                options = scripts.wrong_rule(case.bug)
            pair = zoo.path("moe")
            with TestedServer(
                pair.verifier,
                pair.drafter,
                # Fixed width: a bug can only show in drafted tokens.
                args=[
                    *BLOCK_ARGS,
                    *case.flags,
                    *settings(folder / "settings.json", width="fixed"),
                ],
                env=env,
                log_dir=folder,
            ) as server:
                for filters, sampling in FILTERS.items():
                    if not case.exact and sampling != Sampling():
                        continue
                    # All draws where the rule decides most; a bug shows with fewer.
                    full = case.exact and sampling == Sampling()
                    drawn = number if full else min(number, FEWER)
                    got = draw(server, ids, drawn, sampling, options)
                    p = p_value(got.counts, expected[filters])
                    rejected = p < REJECT
                    row = Row(
                        case.rule,
                        filters,
                        drawn,
                        p,
                        round(got.tau, 3),
                        rejected,
                        rejected is not case.exact,
                    )
                    rows.append(row)
                    show(row)
                    bar.update()
    return rows


def show(row: Row) -> None:
    """Print a row as soon as it is known."""
    verdict = "rejected" if row.rejected else "not rejected"
    tqdm.write(
        f"{row.rule:<32} {row.filters:<16} p = {row.p_value:<10.3g} {verdict:<13} tau {row.tau:.2f}"
        + ("" if row.as_expected else "   NOT AS EXPECTED")
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run every case; the exit status says whether every verdict is the expected one."""
    parser = report.new_parser("bench.exactness.draws", __doc__)
    parser.add_argument("--draws", type=int, default=20_100, metavar="N", help="default: 20100")
    given = parser.parse_args(argv)
    given.draws = -(-given.draws // BATCH) * BATCH
    begin = time.monotonic()
    rows = measure(given.draws)
    wrong = [row for row in rows if not row.as_expected]
    shown = [{**row._asdict(), "p_value": f"{row.p_value:.3g}"} for row in rows]
    print(report.table(shown, given.markdown))
    print(f"{len(rows)} tests, {len(wrong)} not as expected, {time.monotonic() - begin:.0f} s")
    report.write_json(given, {"rows": rows})
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
