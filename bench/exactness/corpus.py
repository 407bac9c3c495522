"""A million greedy tokens with and without speculation, token for token, in float32.

    python -m bench.exactness corpus --json result.json
    python -m bench.exactness corpus --tokens 50000

Both servers run side by side and take turns over the same prompts: held-out prompts, numbered so
that no two are equal, and at every sixteenth place random token ids, which the drafter cannot
predict. The width is fixed at the whole block, so that poor drafts are verified too. Exit status 1
if one token differs.
"""

import itertools
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench import report
from bench.harness.requests import greedy, send_all
from bench.harness.servers import TestedServer, settings
from bench.progress import progress
from dflash_sglang import zoo
from launch.comparison import choose_prompts

CONCURRENCY = 32
TURN = 512  # requests to one server before the other one gets the same
NEW_TOKENS = 256
FIRST_ORDINARY_ID, VOCAB_SIZE = 16, 1024  # of the embedded tokenizer


class Totals(NamedTuple):
    """Everything compared so far."""

    answers: int
    tokens: int
    differences: int  # answers in which a token differs
    verifies: int
    plain_s: float
    dflash_s: float

    @property
    def tau(self) -> float:
        """Committed tokens per verify; an answer's first token comes from its prefill."""
        return (self.tokens - self.answers) / max(self.verifies, 1)


def payloads(seed: int = 0) -> Iterator[dict[str, Any]]:
    """An endless stream of requests."""
    generator = random.Random(seed)
    texts = [prompt.text for prompt in choose_prompts("moe")]
    for number, text in enumerate(itertools.cycle(texts)):
        prompt: str | list[int] = f"{number} {text}"
        if number % 16 == 15:
            ids = range(FIRST_ORDINARY_ID, VOCAB_SIZE)
            prompt = generator.choices(ids, k=generator.randint(4, 60))
        yield greedy(prompt, NEW_TOKENS)


def compare(wanted: int, plain: TestedServer, dflash: TestedServer) -> Totals:
    """Send requests to both servers until `wanted` tokens are compared."""
    totals = Totals(0, 0, 0, 0, 0.0, 0.0)
    source = payloads()
    with progress(unit="tokens", total=wanted, unit_scale=True) as bar:
        while totals.tokens < wanted:
            turn = list(itertools.islice(source, TURN))
            begin = time.perf_counter()
            expected = send_all(plain, turn, CONCURRENCY)
            between = time.perf_counter()
            got = send_all(dflash, turn, CONCURRENCY)
            end = time.perf_counter()
            before = totals.tokens
            totals = _added(totals, expected, got, between - begin, end - between)
            bar.set_postfix(differences=totals.differences, tau=f"{totals.tau:.2f}")
            bar.update(min(totals.tokens, wanted) - before)
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


def main(argv: Sequence[str] | None = None) -> int:
    """Compare; the exit status says whether every token was equal."""
    parser = report.new_parser("bench.exactness.corpus", __doc__, result="result")
    parser.add_argument("--tokens", type=int, default=1_000_000, metavar="N", help="to compare")
    given = parser.parse_args(argv)
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
            dflash.check_idle()
    row = {**totals._asdict(), "tau": round(totals.tau, 3)}
    shown = {**row, "plain_s": f"{totals.plain_s:.0f}", "dflash_s": f"{totals.dflash_s:.0f}"}
    print(report.table([shown], given.markdown))
    report.write_json(given, row, new_tokens=NEW_TOKENS, concurrency=CONCURRENCY)
    return int(totals.differences > 0)


if __name__ == "__main__":
    sys.exit(main())
