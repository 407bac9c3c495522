"""The bound of a single request's verify: its buffers, and which forwards it applies to."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dflash_kernels.verify_bound import CLASSES
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)

from dflash_sglang import hooks
from dflash_sglang.core.width import Bound
from dflash_sglang.step.draft import narrowing
from dflash_sglang.step.draft.narrowing import VerifyBound, bound_experts, read_bound, routed_tokens

WIDTHS = (4, 8)
# Certain drafts are worth 1 each, others nothing.
ONLY_CERTAIN = [0.0] * (CLASSES - 1) + [1.0]


def decide(bound: VerifyBound, *probabilities: float) -> None:
    bound.decide(torch.tensor(probabilities).log(), torch.zeros(len(probabilities)))


def test_everything_is_verified_before_there_are_tables() -> None:
    bound = VerifyBound(WIDTHS, "cpu")
    assert (int(bound.tokens), bound.limit.tolist()) == (8, [7])
    decide(bound, 0.01, 0.01, 0.01)
    assert (int(bound.tokens), bound.limit.tolist()) == (4, [3])


def test_a_draft_sets_the_bound_in_place() -> None:
    """A captured graph of another width reads the same buffer."""
    bound = VerifyBound(WIDTHS, "cpu")
    tokens, limit = bound.tokens, bound.limit
    bound.set_tables(4, [*ONLY_CERTAIN, 0.0, 0.5, 1.0, 1.5])
    decide(bound, 0.9999, 0.5, 0.9999)
    assert (int(tokens), limit.tolist()) == (2, [1])
    assert limit.dtype == torch.int32


def test_the_decision_reaches_the_host_with_its_classes() -> None:
    bound = VerifyBound(WIDTHS, "cpu")
    bound.set_tables(4, [*ONLY_CERTAIN, 0.0, 0.5, 1.0, 1.5])
    decide(bound, 0.9999, 0.5, 0.3)
    on_host = bound.copy_to_host(4)
    decide(bound, 0.1, 0.1, 0.1)  # the next step's, before the host has looked
    assert read_bound(on_host) == Bound(2, [CLASSES - 1, 2, 1])


def test_tables_are_copied_when_they_have_changed_noticeably() -> None:
    bound = VerifyBound(WIDTHS, "cpu")
    prices = [0.0, 0.5, 1.0, inf]
    bound.set_tables(4, [*ONLY_CERTAIN, *prices])
    buffer = bound._tables[4]
    bound.set_tables(4, [*ONLY_CERTAIN, 0.0, 0.504, 1.0, inf])
    assert buffer[CLASSES + 1] == 0.5
    bound.set_tables(4, [*ONLY_CERTAIN, 0.0, 0.52, 1.0, inf])
    assert buffer[CLASSES + 1] == pytest.approx(0.52)
    bound.set_tables(4, [*ONLY_CERTAIN, 0.0, 0.52, 1.0, 1.5])  # no longer forbidden
    assert buffer[-1] == 1.5
    assert bound._tables[4] is buffer


# ---- which forwards -----------------------------------------------------------------------------


def forward(**changed: Any) -> Any:
    """A single request's verify of 8 tokens."""
    given = {
        "batch_size": 1,
        "forward_mode": ForwardMode.TARGET_VERIFY,
        "capture_hidden_mode": CaptureHiddenMode.FULL,
        "input_ids": torch.zeros(8),
    }
    return SimpleNamespace(**{**given, **changed})


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> VerifyBound:
    monkeypatch.setattr(narrowing, "_bound", None)
    made = VerifyBound(WIDTHS, "cpu")
    bound_experts(made)
    return made


def test_a_single_requests_verify_is_bounded(bound: VerifyBound) -> None:
    tokens = routed_tokens(forward())
    assert tokens is not None
    bound.hold(3)
    assert int(tokens) == 3


@pytest.mark.parametrize(
    "changed",
    [
        {"batch_size": 2},
        {"forward_mode": ForwardMode.EXTEND},
        {"forward_mode": ForwardMode.MIXED},
        {"capture_hidden_mode": CaptureHiddenMode.NULL},  # the drafter's
        {"input_ids": torch.zeros(1)},  # nothing was drafted
    ],
    ids=["two requests", "prefill", "mixed", "draft", "width 1"],
)
def test_other_forwards_are_not(bound: VerifyBound, changed: dict[str, Any]) -> None:
    assert routed_tokens(forward(**changed)) is None


def test_nothing_is_bounded_where_verifies_are_not_narrowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(narrowing, "_bound", None)
    assert routed_tokens(forward()) is None


def test_the_hook_leaves_sglangs_own_bound_to_other_forwards(bound: VerifyBound) -> None:
    def original(batch: ForwardBatch) -> str:
        return "SGLang's"

    assert hooks.route_bounded(original, forward(batch_size=2)) == "SGLang's"
    tokens = hooks.route_bounded(original, forward())
    assert tokens.data_ptr() == bound.tokens.data_ptr()
