"""The flags of the accept rule: what they exclude, and block verification outside CUDA."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dflash_sglang.config import WORKER_VARIABLE
from dflash_sglang.preflight.accept_rule_flags import admit_block_verification, rule_problems


def _flags(**changed: Any) -> SimpleNamespace:
    neutral = {
        "speculative_accept_threshold_single": 1.0,
        "speculative_accept_threshold_acc": 1.0,
        "speculative_use_rejection_sampling": False,
        "speculative_use_block_verification": False,
        "enable_deterministic_inference": False,
    }
    return SimpleNamespace(**{**neutral, **changed})


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
    assert rule_problems(_flags(**changed)) == []


@pytest.mark.parametrize(
    ("changed", "told"),
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
def test_two_promises_are_refused(changed: dict[str, Any], told: str) -> None:
    (problem,) = rule_problems(_flags(**changed))
    assert told in problem


def sglangs_check(server_args: Any) -> None:
    """The refusal of SGLang's resolution step."""
    from sglang.srt.arg_groups.model_override_base import resolving_view

    flags = resolving_view(server_args)
    if flags.speculative_use_block_verification and flags.device != "cuda":
        raise ValueError("only supports CUDA or ROCm")


def _server_args(**changed: Any) -> Any:
    from sglang.srt.server_args import ServerArgs

    given = {"speculative_algorithm": "DFLASH", "speculative_use_block_verification": True}
    return ServerArgs(model_path="dummy", device="cpu", **{**given, **changed})


def test_block_verification_is_admitted_on_a_cpu_and_stays_set() -> None:
    from sglang.srt.arg_groups.model_override_base import resolving_view

    args = _server_args()
    admit_block_verification(args, sglangs_check)
    assert resolving_view(args).speculative_use_block_verification is True


@pytest.mark.parametrize("algorithm", ["EAGLE", None])
def test_other_algorithms_keep_sglangs_answer(algorithm: str | None) -> None:
    with pytest.raises(ValueError, match="only supports CUDA"):
        admit_block_verification(_server_args(speculative_algorithm=algorithm), sglangs_check)


def test_sglangs_own_worker_keeps_sglangs_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKER_VARIABLE, "builtin")
    with pytest.raises(ValueError, match="only supports CUDA"):
        admit_block_verification(_server_args(), sglangs_check)
