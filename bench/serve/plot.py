"""Draw the headline result: speed-up over plain decoding by concurrency, from the study's JSON.

    python -m bench.serve plot                  # docs/data/speedup.svg and speedup.png
    python -m bench.serve plot --out mine.svg --study mine.json

Left: SGLang's own DFLASH worker and ours with the trained drafter. Right: our worker with an
untrained drafter, at a fixed width and with the adaptive one. Bars are medians of the rounds,
whiskers the lowest and the highest round, diamonds the result of `launch/demo`, a shorter run.
"""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench import report
from bench.figures import COLOURS, new_figure, save

Rows = Sequence[Mapping[str, Any]]


class Bar(NamedTuple):
    """One contender: which rows of the study it is, and how it looks."""

    label: str
    mode: str
    block_size: int | str
    colour: str
    in_demo: bool = False  # whether `launch/demo` measures it as well


TRAINED = (
    Bar("SGLang's DFLASH, block 8", "builtin", 8, COLOURS["sglang_8"]),
    Bar("SGLang's DFLASH, block 16", "builtin", 16, COLOURS["sglang_16"], in_demo=True),
    Bar("this plugin, adaptive width", "dflash", "adaptive", COLOURS["ours"], in_demo=True),
)
UNTRAINED = (
    Bar("this plugin, fixed at 16", "dflash", 16, COLOURS["ours_fixed"]),
    Bar("this plugin, adaptive width", "dflash", "adaptive", COLOURS["ours"]),
)
PANELS = (
    ("trained drafter", "all families", TRAINED),
    ("untrained drafter", "random", UNTRAINED),
)
BAR = 0.26  # of the distance between two concurrencies


def speedups(rows: Rows, workload: str, bar: Bar, concurrency: int) -> list[float]:
    """Speed-up of each round over plain decoding in the same round."""

    def rates(mode: str, block_size: int | str) -> list[float]:
        wanted = (workload, mode, block_size, concurrency)
        (found,) = (
            row["tokens_per_s_rounds"]
            for row in rows
            if (row["workload"], row["mode"], row["block_size"], row["concurrency"]) == wanted
        )
        return list(found)

    pairs = zip(rates(bar.mode, bar.block_size), rates("plain", 1), strict=True)
    return [rate / plain for rate, plain in pairs]


def draw(study: Mapping[str, Any], demo: Mapping[str, Any]) -> Figure:
    """Two panels, one a drafter.

    Args:
        study: the JSON of `bench.serve.study`.
        demo: the JSON of `launch/demo`.
    """
    figure = new_figure(8.4, 3.5)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2.2))
    for axes, (title, workload, bars) in zip((left, right), PANELS, strict=True):
        _panel(axes, study["rows"], demo["rows"], workload, bars)
        axes.set_title(title, loc="left")
    left.set_ylabel("speed-up over plain decoding")
    left.set_ylim(0, 3.3)  # room for the legends
    machine, rounds = study["machine"], study["arguments"]["rounds"]
    figure.supxlabel(
        f"{machine['cores']} cores of an {machine['cpu']} virtual machine, no GPU; SGLang "
        f"{study['versions']['sglang']}; embedded MoE pair, greedy, float32\n"
        f"bars: median of {rounds} rounds, whiskers: lowest and highest round, "
        f"diamonds: launch/demo on an {demo['provenance']['machine']['cpu']}; "
        "all answers identical to plain decoding's",
        fontsize=7.5,
        color="#555555",
    )
    return figure


def _panel(axes: Axes, rows: Rows, demo: Rows, workload: str, bars: Sequence[Bar]) -> None:
    concurrencies = sorted({row["concurrency"] for row in rows})
    for index, bar in enumerate(bars):
        offset = (index - (len(bars) - 1) / 2) * BAR
        for place, concurrency in enumerate(concurrencies):
            rounds = speedups(rows, workload, bar, concurrency)
            middle, x = statistics.median(rounds), place + offset
            axes.bar(x, middle, 0.9 * BAR, color=bar.colour, label=bar.label if not place else None)
            spread = [[middle - min(rounds)], [max(rounds) - middle]]
            axes.errorbar(x, middle, yerr=spread, color="#444444", elinewidth=0.8, capsize=2)
            axes.annotate(f"{middle:.2f}", (x, 0.04), ha="center", fontsize=7)
            again = [
                row["speedup"]
                for row in demo
                if bar.in_demo and (row["mode"], row["concurrency"]) == (bar.mode, concurrency)
            ]
            axes.plot([x] * len(again), again, "D", color="white", mec="#222222", ms=4)
    axes.axhline(1, color=COLOURS["plain"], linestyle="--", linewidth=1, label="plain decoding")
    axes.set_xticks(range(len(concurrencies)), [f"{n}" for n in concurrencies])
    axes.set_xlabel("concurrent requests")
    axes.legend(fontsize=7.5, loc="upper right")


def main(argv: Sequence[str] | None = None) -> int:
    """Draw, and write one or both formats."""
    parser = report.new_parser("bench.serve.plot", __doc__, result=None)
    parser.add_argument("--study", type=Path, default=report.DATA / "width.json", metavar="FILE")
    parser.add_argument("--demo", type=Path, default=report.DATA / "demo.json", metavar="FILE")
    parser.add_argument(
        "--out",
        type=Path,
        nargs="+",
        default=[report.DATA / "speedup.svg", report.DATA / "speedup.png"],
        metavar="FILE",
        help="svg or png by the ending; default: docs/data/speedup.svg and .png",
    )
    given = parser.parse_args(argv)
    study, demo = (json.loads(file.read_text()) for file in (given.study, given.demo))
    figure = draw(study, demo)
    for file in given.out:
        save(figure, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
