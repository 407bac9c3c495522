"""Refused requests: what would end the scheduler, and what could not be exact."""

from types import SimpleNamespace
from typing import Any

import pytest

from dflash_sglang.step import request_options as requests
from dflash_sglang.step.request_options import disarm, refusal

VOCAB = 100


def request_with(deterministic: bool = False, **changes: Any) -> SimpleNamespace:
    params = SimpleNamespace(min_new_tokens=0, stop_token_ids=None, min_p=0.0, custom_params=None)
    req = SimpleNamespace(
        origin_input_ids=[0, 5, VOCAB - 1],
        vocab_size=VOCAB,
        sampling_params=params,
        custom_logit_processor=None,
        return_hidden_states=False,
        return_sampling_mask=False,
    )
    for name, value in changes.items():
        setattr(params if hasattr(params, name) else req, name, value)
    return req


@pytest.fixture(autouse=True)
def seeds(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    deterministic = SimpleNamespace(enable_deterministic_inference=False)
    monkeypatch.setattr(requests, "get_exec", lambda: SimpleNamespace(deterministic=deterministic))
    return deterministic


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"origin_input_ids": []},
        {"min_p": 0.2},
        {"min_new_tokens": 3, "stop_token_ids": {7}},
        {"custom_logit_processor": "{}"},
    ],
    ids=["plain", "empty prompt", "min_p without seeds", "min_new_tokens", "processor"],
)
def test_served(changes: dict[str, Any]) -> None:
    assert refusal(request_with(**changes)) is None


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"origin_input_ids": [1, VOCAB]}, "input_ids has the token id 100"),
        ({"origin_input_ids": [-1, 2]}, "input_ids has the token id -1"),
        ({"min_new_tokens": 2, "stop_token_ids": {VOCAB + 3}}, "stop_token_ids has the token id"),
        ({"custom_params": {"dflash": {"max_width": 0}}}, "custom_params['dflash'] has 0"),
        ({"return_hidden_states": True}, "return_hidden_states is not supported"),
        ({"return_sampling_mask": True}, "return_sampling_mask is not supported"),
    ],
)
def test_refused_with_the_reason(changes: dict[str, Any], told: str) -> None:
    reason = refusal(request_with(**changes))
    assert reason is not None
    assert told in reason


def test_min_p_with_a_seed_is_refused(seeds: SimpleNamespace) -> None:
    # SGLang's sampler asserts on it, which would end the scheduler.
    seeds.enable_deterministic_inference = True
    req = request_with(min_p=0.2)
    reason = refusal(req)
    assert reason is not None
    assert "min_p=0.2" in reason
    # A refused request still passes through the sampler once.
    disarm(req)
    assert refusal(req) is None
