"""The fastest variant of the experts for each token count, measured on the model's weights.

The crossovers depend on the model (experts, widths), the dtype and the machine, and no formula that
was tried predicted them: looped wins up to about four tokens for 8 small float32 experts and never
in bfloat16. A measurement takes milliseconds.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from dflash_sglang.cpu.matmul.autotune import REPEATS, best_time_s, thread_clock
from dflash_sglang.cpu.matmul.experts import VARIANTS, Experts, Variant, batched

TOKEN_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BUDGET_S = 0.25
# The slowest rate of reading weights assumed; decides whether measuring `batched` fits the budget.
ELEMENTS_PER_S = 1e9
# A variant this many times slower than the best is not measured at the next token count.
DROP_RATIO = 4.0
# Beyond the measured counts: its work does not grow with the number of unchosen experts.
FOR_MANY_TOKENS = "grouped"


class VariantTable(NamedTuple):
    """The fastest variant by token count."""

    limits: tuple[int, ...]  # ascending token counts
    names: tuple[str, ...]  # the variant up to each limit, and one more for all counts beyond

    def select(self, tokens: int) -> Variant:
        """The variant to run; for 0 tokens the one that accepts empty inputs."""
        if not tokens:
            return batched
        return VARIANTS[self.names[bisect.bisect_left(self.limits, tokens)]]

    def __str__(self) -> str:
        ranges = zip(self.names, self.limits, strict=False)
        return ", ".join(
            [*(f"{name} up to {limit}" for name, limit in ranges), f"{self.names[-1]} beyond"]
        )


_measured: dict[tuple[object, ...], VariantTable] = {}


def expert_weights(layer: Any) -> Experts:
    """The expert weights of a layer, cached until one of its parameters is replaced.

    Args:
        layer: SGLang's ``FusedMoE`` with supported experts, after `fusion.lay_out_weights`.
    """
    cached = layer.__dict__.get("cpu_experts")
    if cached is None or cached[0] is not layer.w13_weight or cached[1] is not layer.w2_weight:
        experts = Experts.from_weights(layer.w13_weight.data, layer.w2_weight.data.transpose(1, 2))
        cached = layer.__dict__["cpu_experts"] = (layer.w13_weight, layer.w2_weight, experts)
    current: Experts = cached[2]
    return current


def autotuned_variants(experts: Experts, top_k: int) -> VariantTable:
    """The table for experts of this shape and dtype, measured on the first call for it.

    Args:
        experts: one layer's.
        top_k: experts per token.

    Returns:
        The same object for the same shapes.
    """
    key = (experts.gate_up.shape, experts.gate_up.dtype, top_k)
    if key not in _measured:
        with torch.inference_mode():
            _measured[key] = measure_variants(experts, top_k)
    return _measured[key]


def measure_variants(
    experts: Experts, top_k: int, clock: Callable[[], float] = thread_clock
) -> VariantTable:
    """Time the variants on given weights.

    Args:
        experts: one layer's.
        top_k: experts per token.
        clock: returns seconds.

    Returns:
        The fastest variant for each range of token counts. At most ``BUDGET_S`` is spent, plus the
        token count being measured when it runs out.
    """
    random = torch.Generator().manual_seed(0)
    candidates = dict(VARIANTS)
    gate_up = experts.gate_up
    if (gate_up.numel() + experts.down.numel()) / ELEMENTS_PER_S > BUDGET_S / REPEATS:
        del candidates["batched"]
    deadline = clock() + BUDGET_S
    best: dict[int, str] = {}
    for tokens in TOKEN_COUNTS:
        hidden = torch.randn(tokens, gate_up.shape[2], generator=random).to(gate_up.dtype)
        scores = torch.randn(tokens, gate_up.shape[0], generator=random)
        weights, ids = scores.softmax(-1).topk(top_k, dim=-1)
        cost = {
            name: best_time_s(functools.partial(run, hidden, experts, ids, weights), clock)
            for name, run in candidates.items()
        }
        best[tokens] = min(cost, key=lambda name: cost[name])
        dropped = {name for name in cost if cost[name] > DROP_RATIO * cost[best[tokens]]}
        for name in dropped - {FOR_MANY_TOKENS}:
            del candidates[name]
        if clock() > deadline:
            break
    return _to_table(best)


def _to_table(best: dict[int, str]) -> VariantTable:
    """Merge equal neighbours; a range ends at the geometric mean of two measured counts."""
    limits: list[int] = []
    names: list[str] = []
    counts = sorted(best)
    for count, following in itertools.pairwise(counts):
        if best[count] != best[following]:
            limits.append(int((count * following) ** 0.5))
            names.append(best[count])
    names.append(best[counts[-1]])
    if names[-1] != FOR_MANY_TOKENS:
        limits.append(counts[-1])
        names.append(FOR_MANY_TOKENS)
    return VariantTable(tuple(limits), tuple(names))
