"""On which verifiers a single request's verify is narrowed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.moe.utils import MoeRunnerBackend
from torch import nn

from dflash_sglang.step.setup import narrowing
from dflash_sglang.step.setup.narrowing import RUNNERS


class Method:
    pass


class Experts(nn.Module):
    def __init__(self, method: object) -> None:
        super().__init__()
        self.quant_method = method


class Router(nn.Module):
    def __init__(self, runner: MoeRunnerBackend) -> None:
        super().__init__()
        self.topk_config = SimpleNamespace(runner_backend=runner)


def problems(
    monkeypatch: pytest.MonkeyPatch, layers: list[nn.Module], device: str = "cuda"
) -> list[str]:
    monkeypatch.setattr(narrowing, "FusedMoE", Experts)
    monkeypatch.setattr(narrowing, "TopK", Router)
    monkeypatch.setattr(narrowing, "UnquantizedFusedMoEMethod", Method)
    monkeypatch.setattr(torch.version, "hip", None)
    return list(narrowing._layer_problems(nn.ModuleList(layers), torch.device(device)))


@pytest.mark.parametrize("runner", RUNNERS, ids=str)
def test_runners_that_leave_rows_out(
    runner: MoeRunnerBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert problems(monkeypatch, [Router(runner), Experts(Method())]) == []


@pytest.mark.parametrize("runner", sorted(set(MoeRunnerBackend) - set(RUNNERS), key=str), ids=str)
def test_other_runners_are_named_with_what_to_use(
    runner: MoeRunnerBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    (problem,) = problems(monkeypatch, [Router(runner), Experts(Method())])
    assert f"the MoE runner {runner.value} is not known to leave rows out" in problem
    assert "--moe-runner-backend triton" in problem


def test_a_dense_verifier(monkeypatch: pytest.MonkeyPatch) -> None:
    (problem,) = problems(monkeypatch, [nn.Linear(1, 1)])
    assert "no routed experts" in problem


def test_experts_behind_another_router(monkeypatch: pytest.MonkeyPatch) -> None:
    (problem,) = problems(monkeypatch, [Experts(Method())])
    assert "not all of the verifier's experts are behind SGLang's TopK" in problem


def test_experts_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the router's runner says nothing: the platform computes them."""
    router = Router(MoeRunnerBackend.AUTO)
    assert problems(monkeypatch, [router, Experts(Method())], "cpu") == []
    (problem,) = problems(monkeypatch, [router, Experts(object())], "cpu")
    assert "quantised" in problem
