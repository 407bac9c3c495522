"""Which requests advance one token a step, and from which position on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_sglang.host import limits
from dflash_sglang.host.limits import DraftLimits, draft_range, may_speculate

BLOCK = 4


def request_with(**changed: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"custom_logit_processor": None, "multimodal_inputs": None, **changed})


def batch_of(*reqs: SimpleNamespace, lens: list[int] | None = None) -> Any:
    return SimpleNamespace(reqs=list(reqs), seq_lens=torch.tensor(lens or [5] * len(reqs)))


ORDINARY, HELD = request_with(), request_with(custom_logit_processor="{}")


@pytest.mark.parametrize(
    "changed",
    [{"custom_logit_processor": "{}"}, {"multimodal_inputs": object()}],
    ids=["custom logit processor", "image"],
)
def test_held_to_one_token(changed: dict[str, Any]) -> None:
    assert not may_speculate(request_with(**changed))
    assert may_speculate(ORDINARY)


def test_no_limits_for_ordinary_requests() -> None:
    assert DraftLimits(BLOCK, None, "cpu").of(batch_of(ORDINARY, ORDINARY)) is None


def test_a_held_request_does_not_hold_its_neighbours() -> None:
    found = DraftLimits(BLOCK, None, "cpu").of(batch_of(HELD, ORDINARY))
    assert found is not None
    assert found.drafts.tolist() == [0, 3]
    assert found.drafts.dtype == torch.int32
    assert found.most == 3


def test_most_is_what_the_host_knows() -> None:
    found = DraftLimits(BLOCK, None, "cpu").of(batch_of(HELD, HELD))
    assert found is not None
    assert found.most == 0


@pytest.mark.parametrize(("prefix", "drafts"), [(6, 3), (7, 0), (100, 0)])
def test_a_block_that_reaches_past_the_range_is_not_accepted(prefix: int, drafts: int) -> None:
    # Positions 0..9; a block at prefix 6 ends at 9, one at prefix 7 at 10.
    found = DraftLimits(BLOCK, 10, "cpu").of(batch_of(ORDINARY, lens=[prefix]))
    assert found is not None
    assert found.drafts.tolist() == [drafts]


def test_positions_stay_inside_the_tables() -> None:
    positions = torch.tensor([0, 9, 10, 500])
    assert DraftLimits(BLOCK, 10, "cpu").within_range(positions).tolist() == [0, 9, 9, 9]
    assert DraftLimits(BLOCK, None, "cpu").within_range(positions) is positions


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
