"""Rollback "auto" on a GPU follows from SGLang's own division of the memory, with either way."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.runtime_context import get_context, get_exec, get_parallel, get_schedule

from bench.memory.recurrent_state import BLOCK, H200, LENGTH, QWEN36
from dflash_sglang.preflight.rollback_by_memory import divide_memory
from tests.support.state_shape import qwen36_state_shape

GB = 2**30
LEFT = H200.pools() / GB  # beside the weights of Qwen3.6-35B-A3B on a GPU of 141 GB


def qwen36(states: torch.dtype = torch.float32, **changed: Any) -> Any:
    """What SGLang's configurator is on one GPU, as far as its division reads it."""
    shape = qwen36_state_shape()
    params = Mamba2CacheParams(
        shape=shape,
        layers=list(range(QWEN36.num_layers)),
        dtype=Mamba2StateDType(conv=torch.bfloat16, temporal=states),
    )
    config = SimpleNamespace(mamba2_cache_params=params)
    made = SimpleNamespace(
        mambaish_config=config,
        hybrid_gdn_config=config,
        hybrid_kda_config=None,
        pp_size=1,
        attn_dp_size=1,
        extra_mamba_cache_bytes_per_req=0,
        fused_entry_bytes=lambda kind: None,
        spec_algorithm=SimpleNamespace(is_none=lambda: False),
    )
    made._calculate_mamba_ratio = MethodType(KVCacheConfigurator._calculate_mamba_ratio, made)
    for name, value in changed.items():
        setattr(made, name, value)
    return made


@contextmanager
def server(**flags: Any) -> Iterator[None]:
    """The resolved flags of a server with 48 running requests and states for a prefix cache."""
    resolved: dict[str, Any] = {
        "speculative_algorithm": "DFLASH",
        "speculative_num_draft_tokens": BLOCK,
        "max_running_requests": 48,
        "mamba_radix_cache_strategy": "extra_buffer",
        "disable_overlap_schedule": False,
        "disable_radix_cache": False,
        **flags,
    }
    with get_context().override_server_args(**resolved), get_parallel().override(tp_rank=0):
        yield


def divided(configurator: Any, memory: float = LEFT) -> tuple[bool, int, float]:
    """Whether it replays, running requests with states, GB left."""
    left = divide_memory(KVCacheConfigurator._handle_max_mamba_cache, configurator, memory)
    requests = get_schedule().max_mamba_cache_size // configurator._calculate_mamba_ratio()
    return get_exec().mamba.enable_linear_replayssm_spec, requests, left


def by_sglang_alone(configurator: Any, memory: float = LEFT) -> tuple[int, float]:
    left = KVCacheConfigurator._handle_max_mamba_cache(configurator, memory)
    return get_schedule().max_mamba_cache_size // configurator._calculate_mamba_ratio(), left


def test_replay_where_snapshots_hold_requests_down(caplog: pytest.LogCaptureFixture) -> None:
    configurator = qwen36()
    with server():
        expected = by_sglang_alone(configurator)
    assert expected[0] == H200.requests_by_default(QWEN36, BLOCK)
    with server(), caplog.at_level(logging.INFO):
        replay, requests, _ = divided(configurator)
        assert (replay, requests >= 48) == (True, True)
        assert get_exec().mamba.linear_replayssm_cache_len == LENGTH
    with server(enable_linear_replayssm_spec=True, linear_replayssm_cache_len=LENGTH):
        assert by_sglang_alone(configurator)[0] == requests
    assert requests == H200.requests_by_default(QWEN36, BLOCK, LENGTH)
    (line,) = caplog.messages
    assert f"with snapshots {expected[0]} of the 48 running requests asked for" in line
    assert "with replay 48 have" in line
    snapshot, record = BLOCK * QWEN36.state(), QWEN36.record(BLOCK, LENGTH) - QWEN36.windows(BLOCK)
    assert (
        f"sets {record / 1e6:.1f} MB a request aside for it instead of {snapshot / 1e6:.1f}" in line
    )
    assert f"{48 * (snapshot - record) / 1e9:.1f} GB less for 48 requests" in line


def test_the_record_that_memory_chose_holds_a_long_block() -> None:
    with server(speculative_num_draft_tokens=17):
        assert divided(qwen36())[0] is True
        assert get_exec().mamba.linear_replayssm_cache_len == 32  # SGLang's default is 16


@pytest.mark.parametrize(
    ("flags", "memory"),
    [
        ({"max_running_requests": 8}, LEFT),
        ({}, 3 * LEFT),
        ({"disable_radix_cache": True, "max_running_requests": 32}, LEFT),
        ({"max_mamba_cache_size": 100, "max_running_requests": 20}, LEFT),
    ],
    ids=["few requests", "much memory", "no prefix cache", "states by flag"],
)
def test_snapshots_where_they_hold_what_was_asked_for(flags: dict[str, Any], memory: float) -> None:
    configurator = qwen36()
    with server(**flags):
        expected = by_sglang_alone(configurator, memory)
    with server(**flags):
        assert divided(configurator, memory) == (False, *expected)


def test_snapshots_where_replay_would_hold_no_more(caplog: pytest.LogCaptureFixture) -> None:
    """The number of states is given, and too small with either."""
    with server(max_mamba_cache_size=100), caplog.at_level(logging.INFO):
        assert divided(qwen36())[:2] == (False, 20)
    assert "20 of the 48" in caplog.text
    assert "and replay would hold no more" in caplog.text


@pytest.mark.parametrize("flags", [{"max_mamba_cache_size": 240}, {"disable_radix_cache": True}])
def test_replay_where_snapshots_would_not_even_start(flags: dict[str, Any]) -> None:
    with server(**flags):
        assert by_sglang_alone(qwen36())[1] < 0  # GB left for keys and values
    with server(**flags):
        replay, requests, left = divided(qwen36())
    assert (replay, requests) == (True, 48)
    assert left > 0


def test_too_little_memory_for_either_is_sglangs_error() -> None:
    with server(), pytest.raises(RuntimeError, match="Not enough GPU memory"):
        divided(qwen36(), 0.05)


@pytest.mark.parametrize(
    ("changed", "flags", "why"),
    [
        ({"states": torch.bfloat16}, {"max_running_requests": 96}, "these are torch.bfloat16"),
        ({}, {"linear_attn_decode_backend": "helion"}, "--linear-attn-decode-backend helion"),
        ({}, {"enable_unified_memory": True}, "--enable-unified-memory moves the states"),
    ],
)
def test_snapshots_where_replay_does_not_go(
    changed: dict[str, Any], flags: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with server(**flags):
        expected = by_sglang_alone(qwen36(**changed))
    with server(**flags), caplog.at_level(logging.INFO):
        assert divided(qwen36(**changed)) == (False, *expected)
    assert why in caplog.text


def test_snapshots_with_ragged_verifies(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "compact")
    with server(), caplog.at_level(logging.INFO):
        assert divided(qwen36())[0] is False
    assert "SGLANG_RAGGED_VERIFY_MODE=compact" in caplog.text


@pytest.mark.parametrize("rollback", ["snapshot", "replay"])
def test_a_choice_in_the_settings_stands(tmp_path: Path, rollback: str) -> None:
    """The launcher has made "replay" SGLang's flag; were it lost, this must not bring it back."""
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"rollback": rollback}))
    with server(speculative_adaptive_config=str(file)):
        assert divided(qwen36())[0] is False


def test_a_replay_chosen_at_start_stands(caplog: pytest.LogCaptureFixture) -> None:
    with server(enable_linear_replayssm_spec=True), caplog.at_level(logging.INFO):
        assert divided(qwen36(), 10 * LEFT)[0] is True
    assert not caplog.messages


@pytest.mark.parametrize(
    "changed",
    [
        {"hybrid_gdn_config": None},
        {"hybrid_kda_config": SimpleNamespace()},
    ],
    ids=["other recurrent layers", "Kimi delta attention"],
)
def test_other_layers_are_left_to_sglang(changed: dict[str, Any]) -> None:
    with server():
        assert divided(qwen36(**changed))[0] is False
