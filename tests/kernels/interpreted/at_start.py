"""The self-test of a start: passes with the kernels as they are, and names a wrong one."""

from typing import Any

import pytest
import torch
from dflash_kernels.accept_match import kernel as accept_kernel
from dflash_kernels.prepare_block import kernel as block_kernel
from dflash_kernels.self_test import OpError, self_test


def test_the_kernels_pass() -> None:
    seconds = self_test("cpu", 16, 1000)
    assert set(seconds) == {
        "prepare_block",
        "narrow_block",
        "accept_match",
        "block_verify",
        "token_wise",
    }


@pytest.mark.parametrize("output", range(5))
def test_a_wrong_kernel_is_named(output: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = accept_kernel.accept_match

    def wrong(*args: Any, **options: Any) -> list[torch.Tensor]:
        got = list(right(*args, **options))
        got[output] = got[output] + 1
        return got

    monkeypatch.setattr(accept_kernel, "accept_match", wrong)
    with pytest.raises(OpError, match="accept_match differs from its reference"):
        self_test("cpu", 16, 1000)


def test_a_kernel_that_does_not_compile_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("ptxas failed")

    monkeypatch.setattr(block_kernel, "narrow_block", broken)
    with pytest.raises(OpError, match="narrow_block does not run: ptxas failed"):
        self_test("cpu", 16, 1000)
