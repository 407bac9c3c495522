"""Draw the width simulator's rows: speed-up over plain decoding, a panel a server and batch size.

    python -m bench.width plot                  # docs/data/width_simulator.svg, from its JSON

The same data gives the same file.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench import report
from bench.figures import COLOURS, new_figure, save

Rows = Sequence[Mapping[str, Any]]

# Key of a row: label and style; later ones are drawn on top.
MARKS: dict[str, tuple[str, dict[str, Any]]] = {
    "fixed_8": ("fixed width 8", {"marker": "s", "mfc": "none", "mec": "#6baed6"}),
    "fixed_16": ("fixed width 16", {"marker": "D", "mfc": "none", "mec": COLOURS["sglang_16"]}),
    "oracle": ("best width in hindsight", {"marker": "|", "ms": 12, "mec": COLOURS["best"]}),
    "policy": ("adaptive policy", {"marker": "o", "mfc": COLOURS["ours"], "mec": "none"}),
}


def draw(rows: Rows) -> Figure:
    """Speed-up of each contender, one line a workload.

    Args:
        rows: `bench.width.simulator.Row` as dictionaries.
    """
    servers = list(dict.fromkeys(row["server"] for row in rows))
    batches = list(dict.fromkeys(row["batch_size"] for row in rows))
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    height = 0.7 + len(servers) * (0.5 + 0.2 * len(workloads))
    figure = new_figure(1.7 + 1.6 * len(batches), height)
    panels = figure.subplots(len(servers), len(batches), sharex="row", sharey=True, squeeze=False)
    for server, line in zip(servers, panels, strict=True):
        for batch_size, axes in zip(batches, line, strict=True):
            chosen = (server, batch_size)
            cells = [row for row in rows if (row["server"], row["batch_size"]) == chosen]
            _panel(axes, cells, workloads)
            axes.set_title(f"batch {batch_size}", fontsize=9)
        line[0].set_ylabel(server)
        largest = max(
            row[key] / row["plain"] for row in rows for key in MARKS if row["server"] == server
        )
        line[0].set_xlim(0, largest + 0.2)
    panels[0, 0].set_yticks(range(len(workloads)), workloads)
    panels[0, 0].invert_yaxis()
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(MARKS), fontsize=8)
    figure.supxlabel("simulated speed-up over plain decoding", fontsize=9)
    return figure


def _panel(axes: Axes, rows: Rows, workloads: Sequence[str]) -> None:
    places = [workloads.index(row["workload"]) for row in rows]
    axes.axvline(1, color=COLOURS["plain"], linestyle="--", linewidth=0.8)
    for key, (label, style) in MARKS.items():
        speedups = [row[key] / row["plain"] for row in rows]
        axes.plot(speedups, places, linestyle="none", label=label, **{"ms": 5, **style})
    axes.grid(axis="y", color="#eeeeee")


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the rows of a result file."""
    parser = report.new_parser("bench.width.plot", __doc__, result=None)
    default = report.DATA / "width_simulator.json"
    parser.add_argument("--rows", type=Path, default=default, metavar="FILE")
    parser.add_argument(
        "--out",
        type=Path,
        default=report.DATA / "width_simulator.svg",
        metavar="FILE",
        help="svg or png by the ending; default: docs/data/width_simulator.svg",
    )
    given = parser.parse_args(argv)
    save(draw(json.loads(given.rows.read_text())["rows"]), given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
