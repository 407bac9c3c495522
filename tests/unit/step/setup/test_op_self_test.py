"""The start with Triton ops: a failed self-test stops it with the remedy."""

from __future__ import annotations

import pytest
import torch
from dflash_kernels.types import ServerShapes

from dflash_sglang.errors import OpsError
from dflash_sglang.step.setup import op_self_test as ops
from dflash_sglang.step.setup.op_self_test import prepare_ops

SHAPES = ServerShapes(
    (1, 16), 1000, 1, torch.bfloat16, 5, 8, 128, 128, torch.float32, torch.bfloat16, None
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []

    def passing(*_: object) -> dict[str, float]:
        found.append("self-test")
        return {"prepare_block": 0.5}

    monkeypatch.setattr(ops, "self_test", passing)
    monkeypatch.setattr(ops.dispatch, "use_reference", lambda: found.append("reference"))
    return found


@pytest.mark.parametrize(
    ("setting", "device", "expected"),
    [
        ("triton", "cuda", ["self-test"]),
        ("reference", "cuda", ["reference"]),
        ("triton", "cpu", []),
        ("reference", "cpu", []),
    ],
)
def test_what_a_start_does(
    setting: str, device: str, expected: list[str], calls: list[str]
) -> None:
    prepare_ops(setting, device, SHAPES)
    assert calls == expected


def test_a_failure_names_op_error_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> dict[str, float]:
        raise ops.OpError("accept_match differs from its reference in output 2")

    monkeypatch.setattr(ops, "self_test", failing)
    with pytest.raises(OpsError, match="accept_match differs") as stopped:
        prepare_ops("triton", "cuda", SHAPES)
    assert '{"ops": "reference"}' in str(stopped.value)
