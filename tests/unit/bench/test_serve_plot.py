"""The plot of the headline result shows the numbers of the JSON, by mode and concurrency."""

import json
from pathlib import Path

import pytest
from matplotlib.container import BarContainer

from bench.figures import save
from bench.report import DATA
from bench.serve import plot

STUDY, DEMO = (json.loads((DATA / name).read_text()) for name in ("width.json", "demo.json"))


def test_the_bars_are_the_speedups_of_the_study() -> None:
    for axes, (_, workload, bars) in zip(plot.draw(STUDY, DEMO).axes, plot.PANELS, strict=True):
        drawn = [
            container.patches[0].get_height()
            for container in axes.containers
            if isinstance(container, BarContainer)
        ]
        expected = [
            row["speedup"]
            for bar in bars
            for concurrency in (1, 8, 32)
            for row in STUDY["rows"]
            if (row["workload"], row["mode"], row["block_size"], row["concurrency"])
            == (workload, bar.mode, bar.block_size, concurrency)
        ]
        assert drawn == pytest.approx(expected, abs=1e-3)


def test_a_plot_of_the_same_data_is_the_same_file(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        save(plot.draw(STUDY, DEMO), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
