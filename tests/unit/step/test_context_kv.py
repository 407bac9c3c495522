"""Keys and values that may wait are written in order, before anything else is."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from dflash_sglang.step.context_kv import MAX_WAITING, ContextKV


class Recorded(ContextKV):
    """Remembers the slots of every write."""

    def __init__(self) -> None:
        self._waiting = []
        self._owners = []
        self.writes: list[list[int]] = []

    def _write(self, features: Any, slots: torch.Tensor, positions: torch.Tensor) -> None:
        assert len(features) == len(slots) == len(positions)
        assert len(set(slots.tolist())) == len(slots), "two tokens share a slot"
        self.writes.append(slots.tolist())


def chunk(*slots: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    at = torch.tensor(slots)
    return torch.ones(len(slots), 4), at, at + 100


A, B, C = (cast("Any", object()) for _ in range(3))  # requests


@pytest.fixture
def context() -> Recorded:
    return Recorded()


def test_what_waits_is_written_first(context: Recorded) -> None:
    context.append_later(*chunk(1), [A])
    context.append_later(*chunk(2), [A])
    assert context.writes == []
    context.append(*chunk(3))
    assert context.writes == [[1, 2], [3]]


def test_a_flush_writes_once(context: Recorded) -> None:
    context.append_later(*chunk(1), [A])
    context.flush()
    context.flush()
    assert context.writes == [[1]]


def test_no_more_waits_than_allowed(context: Recorded) -> None:
    for slot in range(MAX_WAITING + 1):
        context.append_later(*chunk(slot), [A])
    assert context.writes == [list(range(MAX_WAITING))]


def test_features_are_kept_from_a_graphs_next_replay(context: Recorded) -> None:
    features, slots, positions = chunk(1)
    context.append_later(features, slots, positions, [A])
    features.zero_()
    assert context._waiting[0].features.sum() == 4


def test_a_slot_of_a_finished_request_does_not_wait_twice(context: Recorded) -> None:
    """A running request gets it by decoding, without a prefill in between."""
    context.append_later(*chunk(1, 7), [A, B])
    context.append_later(*chunk(2, 8), [A, B])  # B's last; its slots are free
    context.append_later(*chunk(8), [A])
    context.append_later(*chunk(7), [A])
    context.flush()
    assert context.writes == [[1, 7, 2, 8], [8, 7]]


def test_a_slot_of_a_retracted_request_does_not_wait_twice(context: Recorded) -> None:
    """As many requests as before, and SGLang's own list of them, changed in place."""
    running = [A, B]
    context.append_later(*chunk(1, 7), running)
    running[1] = C
    context.append_later(*chunk(2, 7), running)
    context.flush()
    assert context.writes == [[1, 7], [2, 7]]


def test_steps_of_the_same_requests_wait_together(context: Recorded) -> None:
    for slot in range(3):
        context.append_later(*chunk(slot, slot + 10), [A, B])
    assert context.writes == []


def test_owners_of_written_tokens_are_let_go(context: Recorded) -> None:
    context.append_later(*chunk(1), [A])
    context.flush()
    assert context._owners == []
