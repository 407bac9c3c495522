"""A compile after the start is reported: Triton compiles for a named GPU that is not here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from dflash_kernels.accept_match.kernel import _accept_match
from dflash_kernels.late_compiles import LateCompile, form_of, watch, what_is_new
from triton import knobs

from bench.kernels.cold_start import KINDS, serve, started
from bench.kernels.specialisations import Specialisation, looked_up, named_gpu

I64, I32, FLAG = torch.int64, torch.int32, torch.bool


@triton.jit
def _of_another(x_ptr, number):  # type: ignore[no-untyped-def]
    triton.language.store(x_ptr, number)


@pytest.fixture(autouse=True)
def triton_as_at_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No hooks, nothing cached, a GPU."""
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", None)
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", None)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with named_gpu():
        yield


@pytest.fixture
def reported() -> list[LateCompile]:
    found: list[LateCompile] = []
    watch(found.append)
    return found


def compile_accept_match(limit: Any = None, lanes: int = 16) -> None:
    """As a launch does, but for the launch."""
    pointers = (I64, I64, I64, limit, None, I32, I32, I64, I64, None)
    _accept_match.warmup(*pointers, 16, 16, 0, 16, LANES=lanes, num_warps=1, grid=(1,))


def test_the_first_launch_is_reported_with_its_seconds(reported: list[LateCompile]) -> None:
    compile_accept_match()
    (late,) = reported
    assert late.kernel == "dflash_kernels.accept_match.kernel._accept_match"
    assert late.op == "accept_match"
    assert late.seconds > 0
    assert late.reason == "its first launch"


def test_a_form_that_was_launched_before_is_not(reported: list[LateCompile]) -> None:
    compile_accept_match()
    compile_accept_match()
    assert len(reported) == 1


def test_what_is_compiled_before_the_watch_is_not() -> None:
    compile_accept_match()
    found: list[LateCompile] = []
    watch(found.append)
    compile_accept_match()
    assert found == []


def test_the_reason_names_what_differs_from_the_nearest_form(reported: list[LateCompile]) -> None:
    compile_accept_match()
    compile_accept_match(limit=I32)
    compile_accept_match(limit=I32, lanes=32)
    assert [late.reason for late in reported[1:]] == [
        "limit_ptr is *i32, was None",
        "LANES is 32, was 16",
    ]


def test_another_packages_kernel_has_no_reason(reported: list[LateCompile]) -> None:
    _of_another.warmup(I64, 3, grid=(1,))
    (late,) = reported
    assert late.kernel == f"{__name__}._of_another"
    assert late.reason is None


def test_hooks_that_were_set_are_called_too(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def hook(**given: Any) -> None:
        called.append(given["fn"].name)

    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", hook)
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", hook)
    found: list[LateCompile] = []
    watch(found.append)
    compile_accept_match()
    assert called == ["_accept_match", "_accept_match"]
    assert len(found) == 1


def test_every_kernel_that_serves_has_a_key_that_is_understood() -> None:
    found: set[Specialisation] = set()
    with looked_up(found), started() as step:
        serve(step, KINDS["filtered"], 4, 8)
    assert len(found) > 10
    for one in found:
        assert len(form_of(one.key)) > 3
        assert what_is_new(map(str, range(99)), one.key, []) == "its first launch"
