"""The self-test of a start: passes with the kernels as they are, and names a wrong one."""

from typing import Any

import pytest
import torch
from dflash_kernels.accept_match import kernel as accept_kernel
from dflash_kernels.case import OPS
from dflash_kernels.context_kv import kernel as context_kernel
from dflash_kernels.prepare_block import kernel as block_kernel
from dflash_kernels.self_test import OpError, self_test
from dflash_kernels.types import ServerShapes

BF16 = torch.bfloat16
SHAPES = ServerShapes(
    widths=(1, 16),
    vocab_size=1000,
    head_ids=250,  # of the second of four ranks
    head_dtype=BF16,
    head_columns=256,
    top=1,
    dtype=BF16,
    layers=3,
    kv_heads=2,
    head_dim=64,
    rotary_dim=64,
    rotary_dtype=torch.float32,
    cache_dtype=BF16,
    rejection=None,
)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"top": 8, "rotary_dim": 32, "cache_dtype": torch.float8_e4m3fn},
        {"top": 8, "rejection": "block_verify", "rotary_dtype": BF16},
        {"rejection": "token_wise", "widths": (3, 17)},
        {"head_dtype": torch.float32},
        {"dtype": torch.float32, "cache_dtype": torch.float32, "widths": (5,)},
    ],
)
def test_the_kernels_pass(changed: dict[str, Any]) -> None:
    shapes = SHAPES._replace(**changed)
    used = set(OPS) - {"block_verify" if shapes.rejection is None else ""}
    assert set(self_test("cpu", shapes)) == used


def test_a_kernel_that_writes_is_tested_by_what_it_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    right = context_kernel.context_kv

    def wrong(kv: torch.Tensor, *rest: Any, **options: Any) -> None:
        right(1.02 * kv, *rest, **options)  # of values: keys are normalised

    monkeypatch.setattr(context_kernel, "context_kv", wrong)
    with pytest.raises(OpError, match="context_kv differs from its reference"):
        self_test("cpu", SHAPES)


@pytest.mark.parametrize("output", range(5))
def test_a_wrong_kernel_is_named(output: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = accept_kernel.accept_match

    def wrong(*args: Any, **options: Any) -> list[torch.Tensor]:
        got = list(right(*args, **options))
        got[output] = got[output] + 1
        return got

    monkeypatch.setattr(accept_kernel, "accept_match", wrong)
    with pytest.raises(OpError, match=r"accept_match at width 1 .*differs from its reference"):
        self_test("cpu", SHAPES)


def test_a_kernel_that_does_not_compile_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("ptxas failed")

    monkeypatch.setattr(block_kernel, "prepare_block", broken)
    with pytest.raises(OpError, match="prepare_block at width 1 does not run: ptxas failed"):
        self_test("cpu", SHAPES)
