"""Tokens that a router sends to no expert: their experts are not computed, the others are alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from torch import Tensor

from dflash_sglang.cpu import ops
from dflash_sglang.cpu.matmul.expert_autotune import VariantTable
from dflash_sglang.cpu.matmul.experts import Experts, grouped
from dflash_sglang.cpu.matmul.routed import routed_tokens
from dflash_sglang.cpu.models import decoder

TOKENS, EXPERTS, TOP_K, DIM, INNER = 16, 6, 2, 8, 4


@contextmanager
def bounded(tokens: int | None) -> Iterator[None]:
    """A forward whose router has a bound."""
    bound = None if tokens is None else (lambda: torch.tensor(tokens, dtype=torch.int32))
    with forward_context(ForwardContext(attn_backend=None, moe_num_token_non_padded=bound)):
        yield


def experts() -> Experts:
    generator = torch.Generator().manual_seed(0)
    return Experts.from_weights(
        torch.randn(EXPERTS, 2 * INNER, DIM, generator=generator),
        torch.randn(EXPERTS, DIM, INNER, generator=generator).transpose(1, 2).contiguous(),
    )


def test_without_a_bound_all_tokens_are_routed() -> None:
    assert routed_tokens(TOKENS) == TOKENS
    with bounded(None):
        assert routed_tokens(TOKENS) == TOKENS


@pytest.mark.parametrize(("bound", "routed"), [(1, 1), (5, 5), (16, 16), (2**31 - 1, 16)])
def test_a_bound_routes_a_prefix(bound: int, routed: int) -> None:
    with bounded(bound):
        assert routed_tokens(TOKENS) == routed


class Counting:
    """A variant that keeps how many tokens it was given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def select(self, tokens: int) -> Any:
        def run(hidden: Tensor, layer: Experts, ids: Tensor, weights: Tensor) -> Tensor:
            self.tokens.append(len(hidden))
            return grouped(hidden, layer, ids, weights)

        assert tokens <= TOKENS
        return run


@pytest.mark.parametrize("bound", [1, 7, 16])
def test_the_fused_decoder_computes_no_more(bound: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "expert_weights", lambda layer: layer)
    gate = torch.randn(EXPERTS, DIM, generator=torch.Generator().manual_seed(1))
    mlp: Any = SimpleNamespace(
        topk=SimpleNamespace(topk_config=SimpleNamespace(top_k=TOP_K, renormalize=True)),
        gate=SimpleNamespace(weight=gate),
        experts=experts(),
    )
    hidden = torch.randn(TOKENS, DIM, generator=torch.Generator().manual_seed(2))
    whole = decoder.expert_mlp(VariantTable((), ("grouped",)))(mlp, hidden, TOKENS)
    counting: Any = Counting()
    got = decoder.expert_mlp(counting)(mlp, hidden, bound)
    assert counting.tokens == [bound]
    torch.testing.assert_close(got[:bound], whole[:bound])
    assert not got[bound:].any()


@pytest.mark.parametrize("bound", [1, 7, 16])
@pytest.mark.parametrize("supported", [True, False])
def test_sglangs_own_layers_compute_no_more(
    bound: int, supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And never see the id -1 that SGLang's router gives such tokens."""
    layer, counting = experts(), Counting()
    monkeypatch.setattr(ops, "is_supported_experts", lambda _: supported)
    monkeypatch.setattr(ops, "expert_weights", lambda _: layer)
    monkeypatch.setattr(ops, "autotuned_variants", lambda _, __: counting)

    class Dispatched(SimpleNamespace):
        def _replace(self, **changed: Any) -> Dispatched:
            return Dispatched(**{**self.__dict__, **changed})

    def forward_cpu(_: Any, given: Any) -> Any:
        ids, weights = given.topk_output.topk_ids, given.topk_output.topk_weights
        out = counting.select(len(ids))(given.hidden_states, layer, ids, weights)
        return SimpleNamespace(hidden_states=out)

    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, DIM, generator=generator)
    ids = torch.rand(TOKENS, EXPERTS, generator=generator).argsort(1)[:, :TOP_K]
    weights = torch.rand(TOKENS, TOP_K, generator=generator)
    whole = grouped(hidden, layer, ids, weights)
    masked = ids.clone()
    masked[bound:] = -1
    given = Dispatched(
        hidden_states=hidden, topk_output=StandardTopKOutput(weights, masked, hidden)
    )
    method: Any = SimpleNamespace(forward_cpu=forward_cpu)
    with bounded(bound):
        got = ops.experts_forward(method, None, given).hidden_states
    assert counting.tokens == [bound]
    torch.testing.assert_close(got[:bound], whole[:bound])
    assert not got[bound:].any()
