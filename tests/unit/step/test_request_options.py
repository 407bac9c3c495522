"""Refused requests, request options, and how many tokens a step may commit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_sglang.step import request_options
from dflash_sglang.step.request_options import (
    CommitLimits,
    clear_rejected_options,
    draft_range,
    max_commit,
    options_problem,
    refusal,
)
from tests.support.requests import VOCAB_SIZE as VOCAB
from tests.support.requests import batch_of, request_with

BLOCK = 4


def with_options(**options: Any) -> dict[str, Any]:
    return {"custom_params": {"dflash": options}}


@pytest.fixture(autouse=True)
def seeds(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    deterministic = SimpleNamespace(enable_deterministic_inference=False)
    exec_context = SimpleNamespace(deterministic=deterministic)
    monkeypatch.setattr(request_options, "get_exec", lambda: exec_context)
    return deterministic


# ---- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"prompt_ids": []},
        {"min_p": 0.2},
        {"min_new_tokens": 3, "stop_token_ids": {7}},
        {"custom_logit_processor": "{}"},
    ],
    ids=["plain", "empty prompt", "min_p without seeds", "min_new_tokens", "processor"],
)
def test_served(changes: dict[str, Any]) -> None:
    assert refusal(request_with(**changes)) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_ids": [1, VOCAB]}, "input_ids has the token id 100"),
        ({"prompt_ids": [-1, 2]}, "input_ids has the token id -1"),
        ({"min_new_tokens": 2, "stop_token_ids": {VOCAB + 3}}, "stop_token_ids has the token id"),
        (with_options(max_width=0), "custom_params['dflash'] has 0"),
        ({"return_hidden_states": True}, "return_hidden_states is not supported"),
        ({"return_sampling_mask": True}, "return_sampling_mask is not supported"),
    ],
)
def test_refused_with_the_reason(changes: dict[str, Any], message: str) -> None:
    reason = refusal(request_with(**changes))
    assert reason is not None
    assert message in reason


def test_min_p_with_a_seed_is_refused(seeds: SimpleNamespace) -> None:
    # SGLang's sampler asserts on it, which would end the scheduler.
    seeds.enable_deterministic_inference = True
    req = request_with(min_p=0.2)
    reason = refusal(req)
    assert reason is not None
    assert "min_p=0.2" in reason
    # A refused request still passes through the sampler once.
    clear_rejected_options(req)
    assert refusal(req) is None


# ---- options -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({}, None),
        ({"custom_logit_processor": "{}"}, 1),
        ({"custom_params": {"other": 1}}, None),
        (with_options(max_width=3), 3),
        (with_options(max_width=99), 99),
        (with_options(speculative=False), 1),
        (with_options(speculative=True), None),
        (with_options(speculative=True, max_width=2), 2),
        (with_options(speculative=False, max_width=9), 1),
    ],
    ids=str,
)
def test_most_tokens_a_step(changes: dict[str, Any], most: int | None) -> None:
    assert max_commit(request_with(**changes)) == most


@pytest.mark.parametrize(
    "options",
    [{}, {"max_width": 1}, {"speculative": False}, {"max_width": 16, "speculative": True}],
)
def test_valid_options(options: dict[str, Any]) -> None:
    assert options_problem({"dflash": options}) is None
    assert options_problem(None) is None
    assert options_problem({"thinking_budget": 5}) is None


@pytest.mark.parametrize(
    "options",
    [{"max_width": 0}, {"max_width": 2.5}, {"max_width": True}, {"speculative": 1}, {"w": 1}, 4],
    ids=str,
)
def test_invalid_options(options: Any) -> None:
    problem = options_problem({"dflash": options})
    assert problem is not None
    assert "custom_params['dflash']" in problem


# ---- limits of a batch -------------------------------------------------------------------------


def limits_of(batch: Any, draft_range: int | None = None) -> torch.Tensor | None:
    """On the device, by way of what the host knows."""
    limits = CommitLimits(BLOCK, draft_range, "cpu")
    return limits.on_device(batch, limits.of(batch))


def test_no_limits_for_ordinary_requests() -> None:
    assert limits_of(batch_of(request_with(), request_with())) is None


def test_a_limited_request_does_not_limit_its_neighbours() -> None:
    batch = batch_of(
        request_with(custom_logit_processor="{}"),
        request_with(),
        request_with(**with_options(max_width=2)),
        request_with(**with_options(max_width=99)),
    )
    assert CommitLimits(BLOCK, None, "cpu").of(batch) == [1, None, 2, 99]
    found = limits_of(batch)
    assert found is not None
    assert found.tolist() == [0, 3, 1, 3]
    assert found.dtype == torch.int32


@pytest.mark.parametrize(("prefix", "drafts"), [(6, 3), (7, 0), (100, 0)])
@pytest.mark.parametrize("lag", [0, 1])
def test_a_block_that_reaches_past_the_range_is_not_accepted(
    prefix: int, drafts: int, lag: int
) -> None:
    """Positions 0..9; a block at prefix 6 ends at 9, one at prefix 7 at 10.

    Also where the host has one token less than the device.
    """
    req = request_with([0] * (prefix + 1 - 3 - lag), prompt_ids=[0] * 3)
    batch = batch_of(req, lens=[prefix])
    found = limits_of(batch, draft_range=10)
    assert found is not None
    assert found.tolist() == [drafts]
    host = CommitLimits(BLOCK, 10, "cpu").of(batch)
    assert host == [1 if prefix - lag >= 7 else None]


@pytest.mark.parametrize(
    ("own", "expected"), [(None, None), (100, None), (67, 67), (68, None)], ids=str
)
def test_the_range_matters_where_a_request_can_pass_it(
    own: int | None, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SimpleNamespace(speculative_num_draft_tokens=BLOCK)
    monkeypatch.setattr(request_options, "get_spec", lambda: spec)
    config = SimpleNamespace() if own is None else SimpleNamespace(max_position_embeddings=own)
    verifier: Any = SimpleNamespace(context_len=64)
    assert draft_range(config, verifier) == expected
