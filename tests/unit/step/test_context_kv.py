"""Keys and values that may wait are written in order, before anything else is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash_sglang.step.context_kv import MAX_WAITING, ContextKV


class Recorded(ContextKV):
    """Remembers the slots of every write."""

    def __init__(self) -> None:
        self._waiting = []
        self.writes: list[list[int]] = []

    def _write(self, features: Any, slots: torch.Tensor, positions: torch.Tensor) -> None:
        assert len(features) == len(slots) == len(positions)
        self.writes.append(slots.tolist())


def chunk(slot: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.ones(1, 4), torch.tensor([slot]), torch.tensor([slot + 100])


@pytest.fixture
def context() -> Recorded:
    return Recorded()


def test_what_waits_is_written_first(context: Recorded) -> None:
    context.append_later(*chunk(1))
    context.append_later(*chunk(2))
    assert context.writes == []
    context.append(*chunk(3))
    assert context.writes == [[1, 2], [3]]


def test_a_flush_writes_once(context: Recorded) -> None:
    context.append_later(*chunk(1))
    context.flush()
    context.flush()
    assert context.writes == [[1]]


def test_no_more_waits_than_allowed(context: Recorded) -> None:
    for slot in range(MAX_WAITING + 1):
        context.append_later(*chunk(slot))
    assert context.writes == [list(range(MAX_WAITING))]


def test_features_are_kept_from_a_graphs_next_replay(context: Recorded) -> None:
    features, slots, positions = chunk(1)
    context.append_later(features, slots, positions)
    features.zero_()
    assert context._waiting[0].features.sum() == 4
