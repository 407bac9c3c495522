"""The width simulator's own arithmetic: traces, speeds of fixed widths, the plot."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench.width import narrowing, plot
from bench.width.costs import SERVERS, Way
from bench.width.simulator import fixed_speeds, simulate
from bench.width.traces import Workload, geometric, load_recorded, trace, workloads

MIXED = Workload("mixed", ((geometric(0.5), geometric(0.9)), (geometric(0.1),)))


def test_a_trace_is_the_same_for_every_contender() -> None:
    assert list(trace(MIXED, 3, 200, seed=1)) == list(trace(MIXED, 3, 200, seed=1))
    assert list(trace(MIXED, 3, 200, seed=1)) != list(trace(MIXED, 3, 200, seed=2))


def test_requests_come_and_go_and_segments_are_equally_long() -> None:
    steps = list(trace(MIXED, 3, 200, seed=1))
    assert [step.segment for step in steps] == [0] * 100 + [1] * 100
    assert len({key for step in steps for key in step.keys}) > 3
    assert all(len(set(step.keys)) == 3 for step in steps)


def test_the_device_saves_experts_and_a_narrower_width_snapshots_as_well() -> None:
    with_snapshots, without = SERVERS
    # 16 tokens, 8 of them verified; from the tables, in milliseconds.
    assert with_snapshots.bounded_seconds(16, 8) == pytest.approx((7.18 - (6.95 - 4.33)) * 1e-3)
    assert without.bounded_seconds(16, 8) == pytest.approx(4.33e-3)
    assert with_snapshots.bounded_seconds(16, 16) == pytest.approx(7.18e-3)
    waiting = Way("", with_snapshots, 0.5e-3)
    assert waiting.extra_seconds(16, 8) == pytest.approx((4.45 - 7.18 + 0.5) * 1e-3)
    assert Way("", with_snapshots, None).extra_seconds(16, 16) == 0


def test_a_longer_wait_of_the_host_is_slower_and_the_device_does_not_wait() -> None:
    """On the recorded drafts, the same for all."""
    file = Path(__file__).resolve().parents[3] / "docs/data/accept_traces.json"
    workload = Workload("all", (tuple(load_recorded(file).values()),))
    rows = {row.way: row for row in narrowing.simulate(SERVERS[0], workload, 300, 2)}
    waits = [rows[f"host waits {wait} ms"].speedup for wait in narrowing.WAITS]
    assert waits == sorted(waits, reverse=True)
    assert rows[narrowing.DEVICE].speedup > waits[1]
    assert 1 < rows[narrowing.DEVICE].verified < 16


@pytest.mark.parametrize("acceptance", [0.2, 0.8])
def test_drawn_drafts_have_the_stated_acceptance(acceptance: float) -> None:
    steps = list(trace(Workload("one", ((geometric(acceptance),),)), 32, 1000, seed=1))
    lengths = [n for step in steps for n in step.accept_lens]
    mean = sum(acceptance**n for n in range(1, 16))
    # 32,000 draws with a standard deviation below 5: 4 sigma is 0.11.
    assert sum(lengths) / len(lengths) == pytest.approx(mean, abs=0.11)


def test_fixed_speeds_are_tokens_by_seconds() -> None:
    steps = list(trace(MIXED, 4, 100, seed=1))
    by_segment = fixed_speeds(steps, SERVERS[1], 4)
    for segment, speeds in enumerate(by_segment):
        of_it = [step for step in steps if step.segment == segment]
        for width in (1, 5, 16):
            tokens = sum(min(n + 1, width) for step in of_it for n in step.accept_lens)
            seconds = len(of_it) * SERVERS[1].seconds(4, width)
            assert speeds[width] == pytest.approx(tokens / seconds)


def test_host_time_and_drafts_are_part_of_a_step() -> None:
    bare, real = SERVERS
    assert bare.seconds(8, 1) == pytest.approx(4.59e-3)
    assert bare.seconds(8, 16) == pytest.approx((18.15 + 0.53) * 1e-3)
    assert real.seconds(8, 1) == pytest.approx((4.59 + 3.4) * 1e-3)
    assert bare.seconds(8, 6) == pytest.approx(((11.41 + 15.40) / 2 + 0.49) * 1e-3)
    # A draft of 48 tokens costs as one of 3 whole blocks, between those of 2 and 4.


def test_a_recorded_length_outside_the_block_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "traces.json"
    file.write_text(json.dumps({"families": {"a": [[3, 16]]}, "confidences": {"a": [[[], []]]}}))
    with pytest.raises(ValueError, match="a has an accept length"):
        load_recorded(file)


def test_recorded_traces_of_the_docs_load() -> None:
    file = Path(__file__).resolve().parents[3] / "docs/data/accept_traces.json"
    assert workloads(file)[-1].name == "recorded"


def test_the_plot_has_a_panel_a_server_and_batch_and_a_mark_a_contender() -> None:
    rows = [simulate(server, MIXED, n, 60, seed=0)._asdict() for server in SERVERS for n in (1, 2)]
    panels = plot.draw(rows).axes
    assert [axes.get_title() for axes in panels] == ["batch 1", "batch 2"] * 2
    for row, axes in zip(rows, panels, strict=True):
        drawn = {line.get_label(): np.asarray(line.get_xdata())[0] for line in axes.lines[1:]}
        assert drawn == {label: row[key] / row["plain"] for key, (label, _) in plot.MARKS.items()}
