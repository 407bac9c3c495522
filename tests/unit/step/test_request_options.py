"""Refused requests, request options, and the range of a drafter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dflash_sglang.step import request_options
from dflash_sglang.step.request_options import (
    clear_rejected_options,
    draft_range,
    max_commit,
    options_problem,
    refusal,
)
from tests.support.requests import VOCAB_SIZE as VOCAB
from tests.support.requests import request_with

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


# ---- range of a drafter ------------------------------------------------------------------------


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
