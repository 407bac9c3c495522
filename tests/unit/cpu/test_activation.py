"""Where the platform applies, and that finding out is cheap."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from dflash_sglang import cpu
from dflash_sglang.cpu import activation
from dflash_sglang.cpu.activation import find_accelerator, inactive_reason


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SGLANG_USE_CPU_ENGINE": "0"},
        {"SGLANG_PLATFORM": ""},
        {"SGLANG_PLATFORM": "dflash_cpu"},
    ],
)
def test_applies_on_a_bare_machine(environment: dict[str, str]) -> None:
    assert inactive_reason(environment, lambda: None) is None


@pytest.mark.parametrize(
    ("environment", "clause"),
    [
        ({"SGLANG_USE_CPU_ENGINE": "1"}, "SGLANG_USE_CPU_ENGINE"),
        ({"SGLANG_PLATFORM": "other"}, "other"),
        ({"SGLANG_PLATFORM": "dflash_cpu", "SGLANG_USE_CPU_ENGINE": "1"}, "ENGINE"),
    ],
)
def test_another_selection_keeps_it_inactive(environment: dict[str, str], clause: str) -> None:
    reason = inactive_reason(environment, lambda: None)
    assert reason is not None
    assert clause in reason


@pytest.mark.parametrize("name", ["cuda", "rocm", "xpu", "npu", "musa", "mps"])
@pytest.mark.parametrize("environment", [{}, {"SGLANG_PLATFORM": "dflash_cpu"}])
def test_every_accelerator_keeps_it_inactive(name: str, environment: dict[str, str]) -> None:
    reason = inactive_reason(environment, lambda: name)
    assert reason is not None
    assert name in reason


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A torch that finds nothing."""
    for module in (torch.cuda, torch.xpu, torch.backends.mps):
        monkeypatch.setattr(module, "is_available", lambda: False)
    monkeypatch.delattr(torch, "npu", raising=False)
    monkeypatch.setattr(torch.version, "musa", None, raising=False)
    return monkeypatch


def available() -> bool:
    return True


def test_bare_machine(bare: pytest.MonkeyPatch) -> None:
    assert find_accelerator() is None


def test_cuda_and_rocm(bare: pytest.MonkeyPatch) -> None:
    bare.setattr(torch.cuda, "is_available", available)
    bare.setattr(torch.version, "hip", None)
    assert find_accelerator() == "cuda"
    bare.setattr(torch.version, "hip", "6.4")
    assert find_accelerator() == "rocm"


def test_xpu(bare: pytest.MonkeyPatch) -> None:
    bare.setattr(torch.xpu, "is_available", available)
    assert find_accelerator() == "xpu"


def test_npu(bare: pytest.MonkeyPatch) -> None:
    bare.setattr(torch, "npu", SimpleNamespace(is_available=available), raising=False)
    assert find_accelerator() == "npu"


def test_musa(bare: pytest.MonkeyPatch) -> None:
    bare.setattr(torch.version, "musa", "4.0", raising=False)
    assert find_accelerator() == "musa"


def test_mps(bare: pytest.MonkeyPatch) -> None:
    bare.setattr(torch.backends.mps, "is_available", available)
    assert find_accelerator() == "mps"


def test_entry_point_names_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    monkeypatch.setattr(activation, "find_accelerator", lambda: None)
    assert cpu.activate() == "dflash_sglang.cpu.platform:CpuPlatform"
    monkeypatch.setattr(activation, "find_accelerator", lambda: "cuda")
    assert cpu.activate() is None


def test_activation_imports_no_sglang() -> None:
    """It runs in every SGLang process, while SGLang is still being imported."""
    code = (
        "import sys; from dflash_sglang import cpu; cpu.activate();"
        "sys.exit(any(name.partition('.')[0] == 'sglang' for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
