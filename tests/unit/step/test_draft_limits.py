"""Which requests advance one token a step, and from which position on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_sglang.step import draft_limits as limits
from dflash_sglang.step.draft_limits import DraftLimits, draft_range, most_tokens, wish_problem

BLOCK = 4


def wishing(**wishes: Any) -> SimpleNamespace:
    return SimpleNamespace(custom_params={"dflash": wishes})


def request_with(**changed: Any) -> Any:
    neutral = {
        "custom_logit_processor": None,
        "sampling_params": SimpleNamespace(custom_params=None),
    }
    return SimpleNamespace(**{**neutral, **changed})


def batch_of(*reqs: SimpleNamespace, lens: list[int] | None = None) -> Any:
    return SimpleNamespace(reqs=list(reqs), seq_lens=torch.tensor(lens or [5] * len(reqs)))


ORDINARY, HELD = request_with(), request_with(custom_logit_processor="{}")


@pytest.mark.parametrize(
    ("changed", "most"),
    [
        ({}, None),
        ({"custom_logit_processor": "{}"}, 1),
        ({"sampling_params": SimpleNamespace(custom_params={"other": 1})}, None),
        ({"sampling_params": wishing(max_width=3)}, 3),
        ({"sampling_params": wishing(max_width=99)}, 99),
        ({"sampling_params": wishing(speculative=False)}, 1),
        ({"sampling_params": wishing(speculative=True)}, None),
        ({"sampling_params": wishing(speculative=True, max_width=2)}, 2),
        ({"sampling_params": wishing(speculative=False, max_width=9)}, 1),
    ],
    ids=str,
)
def test_most_tokens_a_step(changed: dict[str, Any], most: int | None) -> None:
    assert most_tokens(request_with(**changed)) == most


@pytest.mark.parametrize(
    "wishes", [{}, {"max_width": 1}, {"speculative": False}, {"max_width": 16, "speculative": True}]
)
def test_a_wish_that_can_be_granted(wishes: dict[str, Any]) -> None:
    assert wish_problem({"dflash": wishes}) is None
    assert wish_problem(None) is None
    assert wish_problem({"thinking_budget": 5}) is None


@pytest.mark.parametrize(
    "wishes",
    [{"max_width": 0}, {"max_width": 2.5}, {"max_width": True}, {"speculative": 1}, {"w": 1}, 4],
    ids=str,
)
def test_a_wish_that_cannot(wishes: Any) -> None:
    problem = wish_problem({"dflash": wishes})
    assert problem is not None
    assert "custom_params['dflash']" in problem


def test_no_limits_for_ordinary_requests() -> None:
    assert DraftLimits(BLOCK, None, "cpu").of(batch_of(ORDINARY, ORDINARY)) is None


def test_a_held_request_does_not_hold_its_neighbours() -> None:
    wide = request_with(sampling_params=wishing(max_width=99))
    two = request_with(sampling_params=wishing(max_width=2))
    found = DraftLimits(BLOCK, None, "cpu").of(batch_of(HELD, ORDINARY, two, wide))
    assert found is not None
    assert found.tolist() == [0, 3, 1, 3]
    assert found.dtype == torch.int32


@pytest.mark.parametrize(("prefix", "drafts"), [(6, 3), (7, 0), (100, 0)])
def test_a_block_that_reaches_past_the_range_is_not_accepted(prefix: int, drafts: int) -> None:
    # Positions 0..9; a block at prefix 6 ends at 9, one at prefix 7 at 10.
    found = DraftLimits(BLOCK, 10, "cpu").of(batch_of(ORDINARY, lens=[prefix]))
    assert found is not None
    assert found.tolist() == [drafts]


@pytest.mark.parametrize(
    ("own", "expected"), [(None, None), (100, None), (67, 67), (68, None)], ids=str
)
def test_the_range_matters_where_a_request_can_pass_it(
    own: int | None, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SimpleNamespace(speculative_num_draft_tokens=BLOCK)
    monkeypatch.setattr(limits, "get_spec", lambda: spec)
    config = SimpleNamespace() if own is None else SimpleNamespace(max_position_embeddings=own)
    target: Any = SimpleNamespace(context_len=64)
    assert draft_range(config, target) == expected
