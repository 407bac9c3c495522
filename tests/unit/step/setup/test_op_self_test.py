"""The start with Triton ops: a failed self-test stops it with the remedy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dflash_kernels import late_compiles
from dflash_kernels.late_compiles import LateCompile
from dflash_kernels.types import ServerShapes
from triton import knobs

from dflash_sglang.core.accept import Rule
from dflash_sglang.errors import OpsError
from dflash_sglang.step.setup import op_self_test as ops
from dflash_sglang.step.setup.op_self_test import prepare_ops

SHAPES = ServerShapes(
    (1, 16),
    1000,
    1000,
    torch.bfloat16,
    1024,
    1,
    torch.bfloat16,
    5,
    8,
    128,
    128,
    torch.float32,
    torch.bfloat16,
    None,
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


def test_a_head_without_a_shard_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    head = torch.nn.Linear(8, 1000, bias=False)
    group = SimpleNamespace(world_size=1)
    monkeypatch.setattr(ops, "get_parallel", lambda: SimpleNamespace(tp_group=group))
    rotary = SimpleNamespace(rotary_dim=64)
    norm = SimpleNamespace(weight=torch.ones(64, dtype=torch.bfloat16))
    attention = SimpleNamespace(num_kv_heads=2, head_dim=64, rotary_emb=rotary, k_norm=norm)
    drafter = SimpleNamespace(layers=[SimpleNamespace(self_attn=attention)])
    shapes = ops.op_shapes((1, 16), 1000, head, 1, drafter, torch.bfloat16, Rule.MATCH)
    assert (shapes.head_ids, shapes.head_columns) == (1000, 1000)
    assert (shapes.head_dtype, shapes.dtype) == (torch.float32, torch.bfloat16)


# ---- compiles while serving --------------------------------------------------------------------

OURS = LateCompile("dflash_kernels.accept_match.kernel._accept_match", 1.25, "LANES is 32, was 16")
ANOTHERS = LateCompile("sglang.kernels.ops.some_module._kernel", 0.5, None)


@pytest.mark.parametrize(("device", "watched"), [("cuda", True), ("cuda:1", True), ("cpu", False)])
def test_compiles_are_watched_where_triton_serves(
    device: str, watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[Any] = []
    monkeypatch.setattr(late_compiles, "watch", reports.append)
    ops.watch_compiles(device)
    assert reports == [ops.log_compile] * watched


def test_a_compile_of_an_op_while_serving_is_a_warning_with_op_and_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO"):
        ops.log_compile(OURS)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "accept_match" in record.message
    assert "1.25 s" in record.message
    assert "LANES is 32, was 16" in record.message


def test_a_compile_of_another_packages_kernel_is_told_apart(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO"):
        ops.log_compile(ANOTHERS)
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert "sglang.kernels.ops.some_module._kernel, not one of DFLASH's" in record.message


def test_tritons_hook_leads_to_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As Triton calls it, with the names that it gives."""
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", None)
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", None)
    ops.watch_compiles("cuda")
    key = "[('*i64', 'D'), ('constexpr', 32)]{'num_warps': 1}"
    before = key.replace("32", "16")
    kernel = SimpleNamespace(
        arg_names=["x_ptr", "LANES"], device_caches={0: ({before: 0, key: 0},)}
    )
    fn = SimpleNamespace(module="dflash_kernels.an_op.kernel", name="_k", jit_function=kernel)
    given = {"key": key, "repr": "", "fn": fn, "compile": {"device": 0}}
    with caplog.at_level("INFO"):
        for hook in (knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook):
            assert hook is not None
            hook(**given, is_manual_warmup=False, already_compiled=False)
    assert "op an_op while serving" in caplog.text
    assert "LANES is 32, was 16" in caplog.text
