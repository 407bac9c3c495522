"""The variants of the experts against the definition; the router; the measured table."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from dflash_sglang.cpu.matmul.autotune import REPEATS
from dflash_sglang.cpu.matmul.expert_autotune import (
    BUDGET_S,
    VariantTable,
    autotuned_variants,
    measure_variants,
)
from dflash_sglang.cpu.matmul.experts import VARIANTS, Experts, Variant, reference, route

EXPERTS, INTERMEDIATE, DIM = 8, 12, 20
# products of 20 and 12 terms; bfloat16 has eight bits, and each variant rounds at other places
TOLERANCE: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"atol": 1e-5, "rtol": 1e-4},
    torch.bfloat16: {"atol": 3e-2, "rtol": 3e-2},
}


def experts(dtype: torch.dtype = torch.float32) -> Experts:
    random = torch.Generator().manual_seed(1)
    gate_up = torch.randn(EXPERTS, 2 * INTERMEDIATE, DIM, generator=random) * DIM**-0.5
    down = torch.randn(EXPERTS, INTERMEDIATE, DIM, generator=random) * INTERMEDIATE**-0.5
    return Experts.from_weights(gate_up.to(dtype), down.to(dtype))


def routed(tokens: int, top_k: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, DIM, generator=random).to(dtype)
    ids, weights = route(torch.randn(tokens, EXPERTS, generator=random), top_k, renormalize=True)
    return hidden, ids, weights


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("top_k", [1, 2, 3, 8])
@pytest.mark.parametrize("tokens", [1, 2, 7, 63])
def test_variants_agree_with_the_definition(
    variant: str, dtype: torch.dtype, top_k: int, tokens: int
) -> None:
    layer = experts(dtype)
    hidden, ids, weights = routed(tokens, top_k, dtype)
    expected = reference(
        hidden.float(),
        Experts.from_weights(layer.gate_up.float(), layer.down.float()),
        ids,
        weights,
    )
    out = VARIANTS[variant](hidden, layer, ids, weights)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("variant", VARIANTS)
def test_experts_that_nobody_chose(variant: str) -> None:
    """Catches a slice of zero rows, and weights attached to the wrong expert after a gap."""
    layer = experts()
    hidden = torch.randn(5, DIM)
    ids = torch.tensor([[7, 2], [2, 7], [7, 2], [2, 7], [7, 2]])
    weights = torch.tensor([[0.9, 0.1]]).expand(5, 2)
    expected = reference(hidden, layer, ids, weights)
    out = VARIANTS[variant](hidden, layer, ids, weights)
    torch.testing.assert_close(out, expected, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_need_not_sum_to_one(variant: str) -> None:
    layer = experts()
    hidden, ids, weights = routed(6, 2)
    expected = reference(hidden, layer, ids, 3 * weights)
    out = VARIANTS[variant](hidden, layer, ids, 3 * weights)
    torch.testing.assert_close(out, expected, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_inputs_are_left_alone(variant: str) -> None:
    """SGLang hands the same hidden states to what comes after; int32 ids come from its router."""
    layer = experts()
    hidden, ids, weights = routed(4, 2)
    inputs = (hidden, layer.gate_up, layer.down, ids, weights)
    before = [x.clone() for x in inputs]
    VARIANTS[variant](hidden, layer, ids.int(), weights)
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
    table = VariantTable((2,), ("looped", "grouped"))
    out = table.select(0)(torch.empty(0, DIM), layer, torch.empty(0, 2), torch.empty(0, 2))
    assert out.shape == (0, DIM)


def test_choice_by_token_count() -> None:
    table = VariantTable((2, 22), ("looped", "batched", "grouped"))
    names = [table.select(tokens).__name__ for tokens in (1, 2, 3, 22, 23, 10_000)]
    assert names == ["looped", "looped", "batched", "batched", "grouped", "grouped"]
    assert str(table) == "looped up to 2, batched up to 22, grouped beyond"


class Clock:
    """Time that passes only while a variant runs: a price per call and per token."""

    PRICES: ClassVar = {"looped": (1, 10), "batched": (28, 4), "grouped": (60, 1)}

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        for name in VARIANTS:
            monkeypatch.setitem(VARIANTS, name, self._priced(name))

    def _priced(self, name: str) -> Variant:
        def run(hidden: Tensor, _: Experts, __: Tensor, ___: Tensor) -> Tensor:
            per_call, per_token = self.PRICES[name]
            self.now += 1e-6 * (per_call + per_token * len(hidden))
            return hidden

        return run

    def __call__(self) -> float:
        return self.now


def test_measurement_finds_the_crossings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prices cross at 4.5 and 10.7 tokens; the counts 4, 8 and 16 are measured."""
    table = measure_variants(experts(), 2, Clock(monkeypatch))
    assert table.names == ("looped", "batched", "grouped")
    assert table.limits == (5, 11)


def test_measurement_stops_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clock, "PRICES", dict.fromkeys(VARIANTS, (60_000, 0)))
    clock = Clock(monkeypatch)
    table = measure_variants(experts(), 2, clock)
    assert table.names[-1] == "grouped"
    # one round is under way when the budget ends: every variant once to warm up, then the repeats
    assert clock.now <= BUDGET_S + len(VARIANTS) * 0.06 * (REPEATS + 1)


def test_measurement_is_shared_by_equal_layers() -> None:
    layer = experts()
    assert autotuned_variants(layer, 2) is autotuned_variants(experts(), 2)
    assert autotuned_variants(layer, 3) is not autotuned_variants(layer, 2)
