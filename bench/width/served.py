"""What narrowing gains on a server: one request at a time, with and without it, in the same run.

    python -m bench.width served --families sort count --json FILE

Three servers of an embedded pair run side by side, one busy at a time: the verifier alone, ours
that verifies whole drafts (`"narrow": false`), and ours. Each round sends the same prompts to each,
one after the other. With `--seeded` all servers sample by seeds, with
`--enable-deterministic-inference`, so that answers can be compared as well. With `--scripted` each
step of the narrowing server verifies another number of tokens, 1 to the block. Exit status 1 when
an answer differs from the verifier's.
"""

import contextlib
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench import report
from bench.harness import scripts
from bench.harness.requests import greedy
from bench.harness.servers import settings
from bench.progress import progress
from dflash_sglang import zoo
from launch import load
from launch.client import Answer
from launch.serving import Server

PLAIN, WHOLE, NARROWED = "plain", "whole drafts", "narrowed"
SEEDED = ("--enable-deterministic-inference",)


class Row(NamedTuple):
    """One server over the prompts of some families."""

    server: str
    family: str
    prompts: int
    tokens_per_s: float  # median over the rounds
    spread: tuple[float, float]  # slowest and fastest round
    tau: float
    verified: float | None  # share of the drafted tokens; None where all are
    identical: int  # answers of the last round that equal the verifier's


@contextlib.contextmanager
def servers(pair: zoo.Pair, folder: Path, args: Sequence[str]) -> Iterator[dict[str, Server]]:
    """All of them, ready; bounds can be scripted."""
    plugin = scripts.plugin_environment(folder / "plugin", "scripted_widths")
    with contextlib.ExitStack() as stack:
        found = {PLAIN: Server(pair.verifier, args=args, log_dir=folder / "plain")}
        for name, narrow in ((WHOLE, False), (NARROWED, True)):
            place = folder / name.replace(" ", "_")
            given = [*args, *settings(place / "settings.json", narrow=narrow)]
            found[name] = Server(pair.verifier, pair.drafter, args=given, env=plugin, log_dir=place)
        yield {name: stack.enter_context(server) for name, server in found.items()}


def narrowed(server: Server) -> dict[str, int]:
    """Tokens that single requests drafted and verified so far; empty where nothing is narrowed."""
    state: Mapping[str, Any] = server.server_info()["internal_states"][0].get("dflash", {})
    return dict(state.get("narrowed") or {})


def send(
    server: Server, prompts: Sequence[str], tokens: int, *, seeded: bool, scripted: bool
) -> load.Load:
    """The prompts, one after the other."""
    if not (seeded or scripted):
        return load.run(server, prompts, 1, tokens)
    answers = []
    for number, prompt in enumerate(prompts):
        sampling = {"temperature": 1.0, "sampling_seed": number} if seeded else {}
        payload: dict[str, object] = greedy(prompt, tokens, **sampling)
        if scripted:
            payload["rid"] = scripts.random_bound(number)
        answers.append(Answer.parse(server.post("/generate", payload)))
    return load.Load(tuple(answers), 0.0)


def measure(
    running: Mapping[str, Server],
    family: str,
    prompts: Sequence[str],
    *,
    tokens: int,
    rounds: int,
    seeded: bool,
    scripted: bool,
) -> Iterator[Row]:
    """Rounds over all servers, the order alternating."""
    loads: dict[str, list[load.Load]] = {name: [] for name in running}
    before = {name: narrowed(server) for name, server in running.items()}
    for number in range(rounds):
        order = list(running.items())
        for name, server in order if number % 2 == 0 else reversed(order):
            sent = send(
                server, prompts, tokens, seeded=seeded, scripted=scripted and name == NARROWED
            )
            loads[name].append(sent)
    expected = loads[PLAIN][-1].answers
    for name, found in loads.items():
        after = narrowed(running[name])
        share = None
        if after:
            drafted, verified = (after[k] - before[name][k] for k in ("drafted", "verified"))
            share = round(verified / drafted, 3) if drafted else None
        rates = [one.tokens_per_s if one.seconds else 0.0 for one in found]
        yield Row(
            name,
            family,
            len(prompts),
            round(statistics.median(rates), 1),
            (round(min(rates), 1), round(max(rates), 1)),
            round(load.tau(found[-1].answers), 2),
            share,
            sum(
                got.output_ids == right.output_ids
                for got, right in zip(found[-1].answers, expected, strict=True)
            ),
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Serve, measure, print."""
    parser = report.new_parser("bench.width.served", __doc__)
    parser.add_argument("--pair", default="moe", choices=zoo.names())
    parser.add_argument("--families", nargs="+", metavar="NAME", help="default: all, as one")
    parser.add_argument("--prompts", type=int, default=40, metavar="N", help="of each; default 40")
    parser.add_argument("--tokens", type=int, default=96, metavar="N", help="default: 96")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: 5")
    parser.add_argument("--scripted", action="store_true", help="bounds at random; do not time")
    parser.add_argument("--seeded", action="store_true", help="sample; compare, do not time")
    given = parser.parse_args(argv)
    by_family = zoo.prompts(given.pair)
    if given.families is None:
        mixed = [one for group in zip(*by_family.values(), strict=False) for one in group]
        chosen = {"all": mixed[: given.prompts]}
    else:
        chosen = {name: list(by_family[name][: given.prompts]) for name in given.families}
    rows: list[Row] = []
    args = SEEDED if given.seeded else ()
    with (
        tempfile.TemporaryDirectory() as folder,
        servers(zoo.path(given.pair), Path(folder), args) as running,
    ):
        for name, prompts in progress(list(chosen.items()), unit="families"):
            texts = [prompt.text for prompt in prompts]
            rows += measure(
                running,
                name,
                texts,
                tokens=given.tokens,
                rounds=given.rounds,
                seeded=given.seeded,
                scripted=given.scripted,
            )
    print(report.table([row._asdict() for row in rows], given.markdown))
    report.write_json(given, {"pair": given.pair, "seeded": given.seeded, "rows": rows})
    return 0 if all(row.identical == row.prompts for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
