"""The forms of the experts against each other and the definition; the router; the choice."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor

from dflash_sglang.cpu.matmul import expert_autotune as moe_choice
from dflash_sglang.cpu.matmul import experts as moe
from dflash_sglang.cpu.matmul.expert_autotune import ExpertForms, forms_for, measure_forms
from dflash_sglang.cpu.matmul.experts import FORMS, Experts, reference, route

EXPERTS, WIDTH, DIM = 8, 12, 20
# products of 20 and 12 terms; bfloat16 has eight bits, and each form rounds at other places
TOLERANCE = {
    torch.float32: {"atol": 1e-5, "rtol": 1e-4},
    torch.bfloat16: {"atol": 3e-2, "rtol": 3e-2},
}


def experts(dtype: torch.dtype = torch.float32) -> Experts:
    random = torch.Generator().manual_seed(1)
    gate_up = torch.randn(EXPERTS, 2 * WIDTH, DIM, generator=random) * DIM**-0.5
    down = torch.randn(EXPERTS, WIDTH, DIM, generator=random) * WIDTH**-0.5
    return Experts.of(gate_up.to(dtype), down.to(dtype))


def routed(tokens: int, top_k: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, DIM, generator=random).to(dtype)
    ids, weights = route(torch.randn(tokens, EXPERTS, generator=random), top_k, renormalize=True)
    return hidden, ids, weights


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("top_k", [1, 2, 3, 8])
@pytest.mark.parametrize("tokens", [1, 2, 7, 63])
def test_forms_agree_with_the_definition(
    form: str, dtype: torch.dtype, top_k: int, tokens: int
) -> None:
    layer = experts(dtype)
    hidden, ids, weights = routed(tokens, top_k, dtype)
    expected = reference(
        hidden.float(), Experts.of(layer.gate_up.float(), layer.down.float()), ids, weights
    )
    out = FORMS[form](hidden, layer, ids, weights)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("form", FORMS)
def test_experts_that_nobody_chose(form: str) -> None:
    """Catches a slice of zero rows, and weights attached to the wrong expert after a gap."""
    layer = experts()
    hidden = torch.randn(5, DIM)
    ids = torch.tensor([[7, 2], [2, 7], [7, 2], [2, 7], [7, 2]])
    weights = torch.tensor([[0.9, 0.1]]).expand(5, 2)
    expected = reference(hidden, layer, ids, weights)
    out = FORMS[form](hidden, layer, ids, weights)
    torch.testing.assert_close(out, expected, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("form", FORMS)
def test_weights_need_not_sum_to_one(form: str) -> None:
    layer = experts()
    hidden, ids, weights = routed(6, 2)
    expected = reference(hidden, layer, ids, 3 * weights)
    out = FORMS[form](hidden, layer, ids, 3 * weights)
    torch.testing.assert_close(out, expected, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("form", FORMS)
def test_the_inputs_are_left_alone(form: str) -> None:
    """SGLang hands the same hidden states to what comes after; int32 ids come from its router."""
    layer = experts()
    hidden, ids, weights = routed(4, 2)
    inputs = (hidden, layer.gate_up, layer.down, ids, weights)
    before = [x.clone() for x in inputs]
    FORMS[form](hidden, layer, ids.int(), weights)
    for x, kept in zip(inputs, before, strict=True):
        assert torch.equal(x, kept)


@pytest.mark.parametrize("renormalize", [True, False])
def test_route_is_a_softmax_over_all_experts(renormalize: bool) -> None:
    logits = torch.randn(63, 16, dtype=torch.float64)
    share = logits.softmax(-1)
    expected, ids = share.topk(3, dim=-1)
    if renormalize:
        expected = expected / expected.sum(-1, keepdim=True)
    chosen, weights = route(logits, 3, renormalize)
    assert torch.equal(chosen, ids)
    torch.testing.assert_close(weights.double(), expected, atol=1e-6, rtol=1e-5)


def test_no_tokens() -> None:
    layer = experts()
    forms = ExpertForms((2,), ("looped", "grouped"))
    out = forms.form(0)(torch.empty(0, DIM), layer, torch.empty(0, 2), torch.empty(0, 2))
    assert out.shape == (0, DIM)


def test_choice_by_token_count() -> None:
    forms = ExpertForms((2, 22), ("looped", "batched", "grouped"))
    names = [forms.form(tokens).__name__ for tokens in (1, 2, 3, 22, 23, 10_000)]
    assert names == ["looped", "looped", "batched", "batched", "grouped", "grouped"]
    assert str(forms) == "looped up to 2, batched up to 22, grouped beyond"


class Clock:
    """Time that passes only while a form runs: a price per call and per token."""

    PRICES: ClassVar = {"looped": (1, 10), "batched": (28, 4), "grouped": (60, 1)}

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        for name in FORMS:
            monkeypatch.setitem(FORMS, name, self._priced(name))

    def _priced(self, name: str) -> moe.Form:
        def run(hidden: Tensor, *_: Tensor) -> Tensor:
            per_call, per_token = self.PRICES[name]
            self.now += 1e-6 * (per_call + per_token * len(hidden))
            return hidden

        return run

    def __call__(self) -> float:
        return self.now


def test_measurement_finds_the_crossings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prices cross at 4.5 and 10.7 tokens; the counts 4, 8 and 16 are measured."""
    forms = measure_forms(experts(), 2, Clock(monkeypatch))
    assert forms.names == ("looped", "batched", "grouped")
    assert forms.limits == (5, 11)


def test_measurement_stops_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clock, "PRICES", dict.fromkeys(FORMS, (60_000, 0)))
    clock = Clock(monkeypatch)
    forms = measure_forms(experts(), 2, clock)
    assert forms.names[-1] == "grouped"
    # one round is under way when the budget ends: every form once to warm up, then the repeats
    assert clock.now <= moe_choice.BUDGET_S + len(FORMS) * 0.06 * (moe_choice.REPEATS + 1)


def test_measurement_is_shared_by_equal_layers() -> None:
    layer = experts()
    assert forms_for(layer, 2) is forms_for(experts(), 2)
    assert forms_for(layer, 3) is not forms_for(layer, 2)
