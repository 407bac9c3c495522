"""Greedy answers of the hybrid pair with TF32 replay, beside what bfloat16 activations change.

    python -m bench.rollback prompts --json docs/data/rollback_prompts.json

Held-out prompts of the pair are answered by one server after another, on the CPU platform: plain
decoding, snapshots, and replay with float32 and with TF32 products, in float32 and in bfloat16.
The answers are compared with plain decoding in float32, and those in bfloat16 with snapshots in
bfloat16 as well, which is the choice that a server on a GPU has. Up to the first difference the
log-probabilities of the same tokens are compared too, because an answer only changes where two
tokens are almost equally likely.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from bench import report
from bench.harness.configurations import Configuration
from bench.harness.requests import greedy, send_all
from bench.harness.scripts import plugin_environment
from bench.harness.servers import TestedServer, settings
from bench.progress import progress
from bench.rollback.tf32 import Products
from dflash_sglang import zoo
from launch.comparison import choose_prompts

MODEL = "hybrid"
MAX_NEW_TOKENS = 192
CONCURRENCY = 8
FLOAT32, BFLOAT16 = "float32", "bfloat16"


class Mode(NamedTuple):
    """One server."""

    dtype: str  # of weights and activations; states are float32
    rollback: str | None  # None: plain decoding
    products: Products = Products.FLOAT32  # of a replay

    @property
    def name(self) -> str:
        """Short and unique."""
        if self.rollback is None:
            return f"{self.dtype}, plain"
        products = f", {self.products}" if self.rollback == "replay" else ""
        return f"{self.dtype}, {self.rollback}{products}"

    def server(self, folder: Path) -> TestedServer:
        """That server; its log goes to `folder`."""
        configuration = Configuration(block_size=16, page_size=1, model=MODEL)
        pair, args, env = zoo.path(MODEL), ["--dtype", self.dtype], {}
        if self.rollback is None:
            args += configuration.plain_args()
            return TestedServer(pair.verifier, args=args, log_dir=folder)
        args += configuration.args()
        args += settings(folder / "settings.json", width="fixed", rollback=self.rollback)
        if self.products is not Products.FLOAT32:
            env = plugin_environment(folder / "plugin", "tf32_replay")
            env |= {"DFLASH_TF32": self.products}
        return TestedServer(pair.verifier, pair.drafter, args=args, env=env, log_dir=folder)


MODES = [
    Mode(FLOAT32, None),
    Mode(FLOAT32, "replay", Products.TRUNCATED),
    Mode(BFLOAT16, "snapshot"),
    Mode(BFLOAT16, "replay", Products.TRUNCATED),
    Mode(FLOAT32, "snapshot"),
    Mode(FLOAT32, "replay"),
    Mode(FLOAT32, "replay", Products.NEAREST),
    Mode(BFLOAT16, None),
]
REFERENCE = Mode(FLOAT32, None)
REFERENCE_BFLOAT16 = Mode(BFLOAT16, "snapshot")


class Answer(NamedTuple):
    """One answer, token by token."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # of the tokens
    gaps: tuple[float, ...]  # log-probability of the likeliest token less that of the second
    verifies: int


def answers_of(mode: Mode, prompts: Sequence[str], folder: Path) -> list[Answer]:
    """All answers of one server; those that `folder` has from an earlier run are read."""
    file = folder / f"answers_{len(prompts)}.json"
    if file.exists():
        return [_parse(body) for body in json.loads(file.read_text())]
    payloads = [
        {**greedy(prompt, MAX_NEW_TOKENS), "return_logprob": True, "top_logprobs_num": 2}
        for prompt in prompts
    ]
    shutil.rmtree(folder, ignore_errors=True)
    with mode.server(folder) as server:
        bodies = send_all(server, payloads, CONCURRENCY)
    file.write_text(json.dumps(bodies))
    return [_parse(body) for body in bodies]


def compare(mode: Mode, reference: Mode, found: dict[Mode, list[Answer]]) -> dict[str, Any]:
    """One row."""
    pairs = list(zip(found[reference], found[mode], strict=True))
    gaps, shifts = [], []
    for wanted, got in pairs:
        same = _common(wanted.ids, got.ids)
        if wanted.ids != got.ids:
            gaps.append(wanted.gaps[min(same, len(wanted.gaps) - 1)])
        shifts += [
            abs(one - other)
            for one, other in zip(wanted.logprobs[:same], got.logprobs[:same], strict=True)
        ]
    tokens, verifies = (
        sum(len(got.ids) for _, got in pairs),
        sum(got.verifies for _, got in pairs),
    )
    hundredths = quantiles(shifts, n=100)
    return {
        "server": mode.name,
        "compared with": reference.name,
        "prompts": len(pairs),
        "identical": len(pairs) - len(gaps),
        "tokens": tokens,
        "verifies": verifies,
        "shift median": median(shifts),
        "shift 90 %": hundredths[89],
        "shift 99 %": hundredths[98],
        "gap median": median(gaps) if gaps else None,
        "gap largest": max(gaps) if gaps else None,
        "gaps": sorted(gaps),
    }


def rows_of(found: dict[Mode, list[Answer]]) -> Iterator[dict[str, Any]]:
    """All comparisons of the servers that have answered."""
    for mode in found:
        if mode != REFERENCE:
            yield compare(mode, REFERENCE, found)
    for mode in found:
        if mode.dtype == BFLOAT16 and mode != REFERENCE_BFLOAT16:
            yield compare(mode, REFERENCE_BFLOAT16, found)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve, print the table and keep it."""
    parser = report.new_parser("bench.rollback prompts", __doc__, "result")
    parser.add_argument("--prompts", type=int, default=300, help="the first so many")
    parser.add_argument("--servers", type=int, default=len(MODES), help="the first so many")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="logs and answers, to go on from"
    )
    given = parser.parse_args(argv)
    prompts = [prompt.text for prompt in choose_prompts(MODEL, given.prompts)]
    begin, found = time.perf_counter(), dict[Mode, list[Answer]]()
    with tempfile.TemporaryDirectory() as folder:
        for mode in progress(MODES[: given.servers], unit="servers"):
            place = (given.keep or Path(folder)) / mode.name.replace(", ", "_")
            found[mode] = answers_of(mode, prompts, place)
    rows = list(rows_of(found))
    print(report.table([_shown(row) for row in rows], given.markdown))
    given.keep = None  # no result rests on where it lay
    seconds = round(time.perf_counter() - begin, 1)
    report.write_json(given, {"seconds": seconds, "rows": rows})
    return 0


def _parse(body: dict[str, Any]) -> Answer:
    meta = body["meta_info"]
    top = [[candidate[0] for candidate in place] for place in meta["output_top_logprobs"]]
    return Answer(
        tuple(body["output_ids"]),
        tuple(place[0] for place in meta["output_token_logprobs"]),
        tuple(first - second for first, second in top),
        meta.get("spec_verify_ct", 0),
    )


def _common(wanted: Sequence[int], got: Sequence[int]) -> int:
    """Length of the common beginning."""
    length = 0
    for one, other in zip(wanted, got, strict=False):
        if one != other:
            break
        length += 1
    return length


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    return {
        key: f"{value:.1e}" if isinstance(value, float) else value
        for key, value in row.items()
        if key != "gaps"
    }


if __name__ == "__main__":
    sys.exit(main())
