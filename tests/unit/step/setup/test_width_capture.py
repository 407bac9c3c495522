"""Which widths are built, for which batch sizes, and what is left out when memory runs short."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.arg_groups.cuda_graph_hook import generate_decode_cuda_graph_batch_sizes

from dflash_sglang.config import Settings, WidthChoice
from dflash_sglang.step.setup import width_capture
from dflash_sglang.step.setup.width_capture import (
    LEAST_FREE_GB,
    MOST_PADDING,
    BuiltWidths,
    build_widths,
    few_batch_sizes,
    without_gathers,
)

BLOCK = 16
LADDER = (1, 4, 8, 16)
FLAGS = SimpleNamespace(disable_cuda_graph_padding=False, speculative_algorithm="DFLASH")


def captured(largest: int) -> list[int]:
    return list(generate_decode_cuda_graph_batch_sizes(FLAGS, largest))


@pytest.fixture(autouse=True)
def padding(monkeypatch: pytest.MonkeyPatch) -> Any:
    graph = SimpleNamespace(disable_cuda_graph_padding=False)
    monkeypatch.setattr(width_capture, "get_exec", lambda: SimpleNamespace(graph=graph))
    return graph


class Device:
    """Runners of verifier and drafter that take memory."""

    def __init__(self, free_gb: float, width_gb: float, whole: Sequence[int]) -> None:
        self.free_gb, self.width_gb, self.whole = free_gb, width_gb, whole
        self.drafted: dict[int, Sequence[int] | None] = {}
        self.verified: dict[int, Sequence[int] | None] = {}
        self.drafter: Any = SimpleNamespace(build=self._draft)
        self.runners: Any = SimpleNamespace(
            build=self._verify, captured=lambda width: tuple(self.whole)
        )

    def _draft(self, width: int, sizes: Sequence[int] | None) -> None:
        self.drafted[width] = sizes

    def _verify(self, width: int, sizes: Sequence[int] | None) -> None:
        self.verified[width] = sizes
        self.free_gb -= self.width_gb

    def build(self, ladder: Sequence[int] = LADDER, narrow_max_bs: int = 32) -> BuiltWidths:
        return build_widths(
            ladder,
            self.drafter,
            self.runners,
            block_size=BLOCK,
            narrow_max_bs=narrow_max_bs,
            free_gb=lambda: self.free_gb,
        )


def test_widths_between_are_captured_up_to_the_setting() -> None:
    device = Device(80.0, 0.5, captured(48))
    built = device.build(narrow_max_bs=32)
    assert built.largest_batch == {4: 32, 8: 32}
    assert list(device.verified) == [1, 4, 8]  # the block's is there
    assert list(device.drafted) == [4, 8]  # plain decoding drafts nothing
    assert device.verified[1] == few_batch_sizes(captured(48), 48)
    assert device.verified[4] == device.drafted[4] == few_batch_sizes(captured(48), 32)
    assert built.memory_gb == 1.5


def test_a_setting_above_all_batch_sizes_limits_nothing() -> None:
    assert Device(80.0, 0.5, captured(48)).build(narrow_max_bs=256).largest_batch == {}


def test_none_between_with_the_setting_at_0() -> None:
    device = Device(80.0, 0.5, captured(48))
    assert device.build(narrow_max_bs=0).largest_batch == {4: 0, 8: 0}
    assert list(device.verified) == [1]


def test_a_widest_width_below_the_block_serves_every_batch_size() -> None:
    device = Device(80.0, 0.5, captured(48))
    assert device.build((1, 4, 8), narrow_max_bs=32).largest_batch == {4: 32}
    assert device.verified[8] == device.drafted[8] == captured(48)


def test_where_nothing_is_captured_every_width_serves_every_batch_size() -> None:
    device = Device(80.0, 0.0, ())
    assert device.build(narrow_max_bs=0).largest_batch == {}
    assert device.verified == {1: None, 4: None, 8: None}


@pytest.mark.parametrize(
    ("free_gb", "left_out"), [(LEAST_FREE_GB - 0.1, [1, 4, 8]), (3.9, [8]), (2.5, [4, 8])]
)
def test_short_of_memory_the_widths_that_are_missed_least_are_left_out(
    free_gb: float, left_out: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """A fault that it would catch: graphs that take the memory of the first long prompt."""
    device = Device(free_gb, 1.0, captured(48))
    with caplog.at_level(logging.WARNING):
        built = device.build(narrow_max_bs=256)
    assert built.largest_batch == dict.fromkeys(left_out, 0)
    assert not set(device.verified) & set(left_out)
    assert not set(device.drafted) & set(left_out)
    assert f"leaves out the widths {', '.join(map(str, left_out))}: " in caplog.text
    assert "--mem-fraction-static" in caplog.text


def test_on_a_cpu_short_of_memory_no_width_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is captured there; what a width took is said all the same."""
    device = Device(0.5, 0.0, ())
    with caplog.at_level(logging.INFO):
        assert device.build().largest_batch == {}
    assert device.verified == {1: None, 4: None, 8: None}
    assert "DFLASH width 4: 0.00 GB and 0.0 s; 0.50 GB are free." in caplog.messages


def test_the_widest_width_is_built_whatever_memory_there_is() -> None:
    device = Device(0.1, 0.0, captured(48))
    device.build((1, 8))
    assert list(device.verified) == [8]


def test_what_a_width_took_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        Device(80.0, 0.25, captured(8)).build()
    lines = [line for line in caplog.messages if line.startswith("DFLASH width ")]
    assert [line.split(":")[0] for line in lines] == [f"DFLASH width {w}" for w in (1, 4, 8)]
    assert "0.25 GB and 0.0 s for graphs of batch sizes 1, 2, 3, 5, 8; 79.75 GB" in lines[0]


@pytest.mark.parametrize("largest", [1, 2, 3, 8, 20, 48, 100, 256])
def test_few_batch_sizes_pad_little(largest: int) -> None:
    sizes = few_batch_sizes(captured(largest), largest)
    assert sizes == sorted(set(sizes) & set(captured(largest)))
    assert sizes[-1] == largest
    for batch_size in range(1, largest + 1):
        padded = min(size for size in sizes if size >= batch_size)
        assert padded <= MOST_PADDING * batch_size or padded == batch_size + 1 <= 3


def test_few_batch_sizes_are_about_half() -> None:
    assert few_batch_sizes(captured(48), 32) == [1, 2, 3, 5, 7, 10, 14, 18, 24, 32]
    assert len(few_batch_sizes(captured(256), 256)) < 0.5 * len(captured(256))


def test_where_sglang_pads_no_batch_all_sizes_are_captured(padding: Any) -> None:
    padding.disable_cuda_graph_padding = True
    assert few_batch_sizes(range(1, 49), 32) == list(range(1, 33))


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(width_capture, "require_gathered_buffer", lambda: True)


def test_ranks_that_exchange_tokens_have_one_width(
    gathered: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps measured there would lack the other ranks' numbers of tokens."""
    settings = without_gathers(Settings(max_width=8))
    assert settings.width_settings(BLOCK).ladder(BLOCK) == (8,)
    assert "--moe-a2a-backend" in caplog.text


def test_other_ranks_keep_their_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(width_capture, "require_gathered_buffer", lambda: False)
    assert without_gathers(Settings()) == Settings()
    assert Settings().width is WidthChoice.ADAPTIVE
