"""Flags that exclude each other: of the accept rule, and of the recurrent layers' rollback."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_sglang.config import Rollback, Settings
from dflash_sglang.preflight.refused_flags import problems_for_any_worker, problems_for_our_worker
from tests.support.server_flags import server_flags


def problems(settings: Settings | None = None, **changed: Any) -> list[str]:
    return list(problems_for_our_worker(server_flags(**changed), settings or Settings()))


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"speculative_accept_threshold_acc": 0.5, "speculative_accept_threshold_single": 0.3},
        {"speculative_use_rejection_sampling": True},
        {"speculative_use_block_verification": True},
        {"speculative_use_block_verification": True, "speculative_use_rejection_sampling": True},
        {"enable_deterministic_inference": True},
    ],
    ids=lambda changed: " ".join(changed) or "none",
)
def test_one_rule_passes(changed: dict[str, Any]) -> None:
    assert problems(**changed) == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"speculative_accept_threshold_acc": 0.0}, "-acc (given: 0.0) must be above 0"),
        ({"speculative_accept_threshold_single": 1.5}, "-single (given: 1.5) must be above 0"),
        (
            {"speculative_use_block_verification": True, "speculative_accept_threshold_acc": 0.5},
            "two rules for one decision",
        ),
        (
            {"speculative_use_rejection_sampling": True, "enable_deterministic_inference": True},
            "--speculative-use-rejection-sampling makes the text depend on the drafts",
        ),
        (
            {"speculative_accept_threshold_single": 0.5, "enable_deterministic_inference": True},
            "--speculative-accept-threshold-single makes the text depend on the drafts",
        ),
    ],
    ids=["acc 0", "single above 1", "two rules", "rejection with seeds", "relaxed with seeds"],
)
def test_two_promises_are_refused(changed: dict[str, Any], message: str) -> None:
    (problem,) = problems(**changed)
    assert message in problem


@pytest.mark.parametrize(
    ("changed", "rollback", "message"),
    [
        ({"enable_linear_replayssm_spec": True}, "snapshot", "two answers to one question"),
        ({"enable_unified_memory": True}, "replay", "--enable-unified-memory moves"),
        (
            {"enable_unified_memory": True, "enable_linear_replayssm_spec": True},
            "auto",
            "--enable-unified-memory moves",
        ),
    ],
    ids=["flag and settings differ", "unified memory", "unified memory and the flag"],
)
def test_rollback_that_cannot_work_is_refused(
    changed: dict[str, Any], rollback: str, message: str
) -> None:
    (problem,) = problems(Settings(rollback=Rollback(rollback)), **changed)
    assert message in problem


@pytest.mark.parametrize(
    ("changed", "rollback"),
    [
        ({}, "auto"),
        ({"enable_linear_replayssm_spec": True}, "auto"),
        ({"enable_linear_replayssm_spec": True}, "replay"),
        ({"enable_unified_memory": True}, "snapshot"),
    ],
)
def test_rollback_that_can_work_passes(changed: dict[str, Any], rollback: str) -> None:
    assert problems(Settings(rollback=Rollback(rollback)), **changed) == []


TORCH_LORA = {"enable_lora": True, "lora_backend": "torch_native", "device": "cuda"}


@pytest.mark.parametrize("turned_on", [{"enable_lora": True}, {"lora_paths": ["folder"]}], ids=str)
def test_lora_buffers_too_small_for_a_block_are_refused(turned_on: dict[str, Any]) -> None:
    changed = {**TORCH_LORA, "enable_lora": None, **turned_on}
    (problem,) = problems_for_any_worker(server_flags(**changed))
    assert "--lora-backend (given: torch_native) with CUDA graphs" in problem
    assert "--disable-decode-cuda-graph" in problem


@pytest.mark.parametrize(
    "changed",
    [
        {"lora_backend": "csgmv"},
        {"disable_decode_cuda_graph": True},
        {"device": "cpu"},
        {"device": None},  # not resolved yet
        {"enable_lora": False, "lora_paths": ["folder"]},  # SGLang then ignores the paths
        {"enable_lora": None},
    ],
    ids=str,
)
def test_lora_with_room_for_a_block_passes(changed: dict[str, Any]) -> None:
    assert list(problems_for_any_worker(server_flags(**{**TORCH_LORA, **changed}))) == []
