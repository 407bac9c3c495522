"""How plots of bench/ look and are saved: the same data gives the same file."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

# Colour-blind safe, and the same contender has the same colour in every plot.
COLOURS = {
    "plain": "#666666",
    "sglang_8": "#a6cee3",
    "sglang_16": "#4e79a7",
    "ours": "#e15759",
    "ours_fixed": "#f1aeb0",
    "best": "#333333",
}

STYLE: dict[Any, object] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: searchable, and a small file
    "svg.hashsalt": "dflash_sglang",  # ids are random without
}


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of a size in inches; it needs no display."""
    mpl.rcParams.update(STYLE)
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, file: Path) -> None:
    """Write a figure; the file's ending (svg, png) chooses the format."""
    # Without a date, so that a plot of the same data is the same file.
    metadata = {"Date": None} if file.suffix == ".svg" else {"Software": None}
    figure.savefig(file, dpi=150, facecolor="white", metadata=metadata)
