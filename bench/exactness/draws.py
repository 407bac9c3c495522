"""Sampled answers of a server against the verifier's law, for every accept rule.

    python -m bench.exactness.draws --json result.json    # 20,100 draws a rule
    python -m bench.exactness.draws --draws 3000

The law comes from transformers: the probability of every continuation of a context, which no
speculation and no SGLang takes part in. A chi-square test compares it with what the server drew.
Rules with a planted mistake go through the same test, which must reject them; so must the relaxed
rule, which is not exact and does not claim to be. Exit status 1 when a verdict is not as it should
be. The environment is that of ``. launch/env.sh``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from bench.harness import scripts
from bench.harness.draw_tests import (
    BATCH,
    BLOCK_ARGS,
    REJECT,
    Sampling,
    context,
    draw,
    law,
    p_value,
)
from bench.harness.servers import TestedServer, settings
from bench.harness.verifier_distribution import Witness
from dflash_sglang import zoo
from launch.report import provenance

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
    mistake: str | None = None  # planted, see server_side/wrong_rules.py


CASES = (
    Case("sample and match", (), exact=True),
    Case("token-wise rejection", TOKEN_WISE, exact=True),
    Case("block verification", BLOCK, exact=True),
    Case("relaxed, acc 0.5", ("--speculative-accept-threshold-acc", "0.5"), exact=False),
    Case("match that accepts every draft", (), exact=False, mistake="always"),
    Case("token-wise, bonus from p", TOKEN_WISE, exact=False, mistake="bonus"),
    Case("block, bonus from p", BLOCK, exact=False, mistake="bonus"),
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
    witness = Witness()
    ids = context(witness)
    laws = {name: law(witness, ids, sampling) for name, sampling in FILTERS.items()}
    total = sum(len(FILTERS) if case.exact else 1 for case in CASES)
    rows = []
    with tempfile.TemporaryDirectory() as name, tqdm(total=total, unit=" tests") as bar:
        for index, case in enumerate(CASES):
            folder = Path(name) / str(index)
            env = {}
            if case.mistake is not None:
                env = scripts.wrong_rule(folder / "plugin", case.mistake)
            pair = zoo.path("moe")
            with TestedServer(
                pair.verifier,
                pair.drafter,
                # Verified whole: a mistake shows in what is drafted.
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
                    # In full where the rule decides most; a mistake shows with fewer.
                    full = case.exact and sampling == Sampling()
                    drawn = number if full else min(number, FEWER)
                    got = draw(server, ids, drawn, sampling)
                    p = p_value(got.counts, laws[filters])
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
    """Print a row."""
    verdict = "rejected" if row.rejected else "not rejected"
    tqdm.write(
        f"{row.rule:<32} {row.filters:<16} p = {row.p_value:<10.3g} {verdict:<13} tau {row.tau:.2f}"
        + ("" if row.as_expected else "   NOT AS EXPECTED")
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench.exactness.draws", description="See the module.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--draws", type=int, default=20_100, metavar="N", help="default: 20100")
    return parser.parse_args(argv)


def main() -> int:
    """Run every case; the exit status says whether every verdict is as it should be."""
    given = parse()
    number = -(-given.draws // BATCH) * BATCH
    begin = time.monotonic()
    rows = measure(number)
    wrong = [row for row in rows if not row.as_expected]
    print(f"{len(rows)} tests, {len(wrong)} not as expected, {time.monotonic() - begin:.0f} s")
    if given.json is not None:
        result = {"rows": [row._asdict() for row in rows], **provenance({"draws": number})}
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
