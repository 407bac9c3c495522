"""A million greedy tokens with and without speculation, token for token, in float32.

    python -m bench.exactness.corpus --json result.json
    python -m bench.exactness.corpus --tokens 50000

Both servers run side by side and take turns over the same prompts: held-out prompts, each behind a
number of its own so that no two are alike, and every sixteenth one random token ids, which the
drafter cannot guess. Blocks are verified whole, so that drafts of every quality are. Exit status 1
when one token differs. The environment is that of ``. launch/env.sh``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from bench.harness.requests import ask_all, greedy
from bench.harness.servers import TestedServer, settings
from dflash_sglang import zoo
from launch.comparison import choose_prompts
from launch.report import provenance

CONCURRENCY = 32
TURN = 512  # requests before the other server has its turn
NEW_TOKENS = 256
FIRST_ORDINARY_ID, VOCAB_SIZE = 16, 1024  # of the embedded tokenizer


class Totals(NamedTuple):
    """What was compared so far."""

    answers: int
    tokens: int
    differences: int  # answers with one
    verifies: int
    plain_s: float
    dflash_s: float

    @property
    def tau(self) -> float:
        """Committed tokens per verify; an answer's first token comes from its prefill."""
        return (self.tokens - self.answers) / max(self.verifies, 1)


def payloads(seed: int = 0) -> Iterator[dict[str, Any]]:
    """Requests without end."""
    generator = random.Random(seed)
    texts = [prompt.text for prompt in choose_prompts("moe")]
    for number, text in enumerate(itertools.cycle(texts)):
        prompt: str | list[int] = f"{number} {text}"
        if number % 16 == 15:
            ids = range(FIRST_ORDINARY_ID, VOCAB_SIZE)
            prompt = generator.choices(ids, k=generator.randint(4, 60))
        yield greedy(prompt, NEW_TOKENS)


def compare(wanted: int, plain: TestedServer, dflash: TestedServer) -> Totals:
    """Ask both servers until `wanted` tokens were compared."""
    totals = Totals(0, 0, 0, 0, 0.0, 0.0)
    source = payloads()
    with tqdm(total=wanted, unit=" tokens", unit_scale=True) as bar:
        while totals.tokens < wanted:
            turn = list(itertools.islice(source, TURN))
            begin = time.perf_counter()
            expected = ask_all(plain, turn, CONCURRENCY)
            between = time.perf_counter()
            got = ask_all(dflash, turn, CONCURRENCY)
            end = time.perf_counter()
            before = totals.tokens
            totals = _added(totals, expected, got, between - begin, end - between)
            bar.set_postfix(differences=totals.differences, tau=f"{totals.tau:.2f}")
            bar.update(totals.tokens - before)
    return totals


def _added(
    totals: Totals, expected: Sequence[Any], got: Sequence[Any], plain_s: float, dflash_s: float
) -> Totals:
    pairs = list(zip(expected, got, strict=True))
    return Totals(
        totals.answers + len(pairs),
        totals.tokens + sum(len(left["output_ids"]) for left, _ in pairs),
        totals.differences + sum(a["output_ids"] != b["output_ids"] for a, b in pairs),
        totals.verifies + sum(answer["meta_info"].get("spec_verify_ct", 0) for answer in got),
        totals.plain_s + plain_s,
        totals.dflash_s + dflash_s,
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench.exactness.corpus", description="See the module.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--tokens", type=int, default=1_000_000, metavar="N")
    return parser.parse_args(argv)


def main() -> int:
    """Compare; the exit status says whether every token was equal."""
    given = parse()
    pair = zoo.path("moe")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (
            TestedServer(pair.verifier, log_dir=folder / "plain") as plain,
            TestedServer(
                pair.verifier,
                pair.drafter,
                args=settings(folder / "settings.json", width="fixed"),
                log_dir=folder / "dflash",
            ) as dflash,
        ):
            totals = compare(given.tokens, plain, dflash)
            dflash.check_rest()
    print(
        f"{totals.answers} answers, {totals.tokens} tokens, {totals.differences} answers differ, "
        f"tau {totals.tau:.2f}, plain {totals.plain_s:.0f} s, DFLASH {totals.dflash_s:.0f} s"
    )
    if given.json is not None:
        arguments = {"tokens": given.tokens, "new_tokens": NEW_TOKENS, "concurrency": CONCURRENCY}
        result = {**totals._asdict(), "tau": round(totals.tau, 3), **provenance(arguments)}
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(totals.differences > 0)


if __name__ == "__main__":
    sys.exit(main())
