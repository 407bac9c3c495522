"""Which form of the experts to run for how many tokens, measured at start on the model's weights.

The crossings depend on the model (experts, widths), the dtype and the machine, and no formula that
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

from dflash_sglang.cpu.matmul.experts import FORMS, Experts, Form, batched
from dflash_sglang.cpu.matmul.timing import REPEATS, fastest, thread_clock

TOKEN_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BUDGET_S = 0.25
# The slowest reading of weights assumed; only decides whether trying all experts fits the budget.
ELEMENTS_PER_S = 1e9
# A form this many times slower than the best is not measured at the next token count.
HOPELESS = 4.0
# Beyond what was measured: its work does not grow with experts that nobody chose.
FOR_MANY_TOKENS = "grouped"


class ExpertForms(NamedTuple):
    """The measured choice."""

    limits: tuple[int, ...]  # ascending token counts
    names: tuple[str, ...]  # the form up to each limit, and one more for all counts beyond

    def form(self, tokens: int) -> Form:
        """The form to run; without tokens, the one whose products may be empty."""
        if not tokens:
            return batched
        return FORMS[self.names[bisect.bisect_left(self.limits, tokens)]]

    def __str__(self) -> str:
        ranges = zip(self.names, self.limits, strict=False)
        return ", ".join(
            [*(f"{name} up to {limit}" for name, limit in ranges), f"{self.names[-1]} beyond"]
        )


_measured: dict[tuple[object, ...], ExpertForms] = {}


def experts_of(layer: Any) -> Experts:
    """The weights of a layer, as its parameters are now.

    Args:
        layer: SGLang's ``FusedMoE`` with plain experts, as `fusion.lay_out_weights` leaves it.
    """
    known = layer.__dict__.get("cpu_experts")
    if known is None or known[0] is not layer.w13_weight or known[1] is not layer.w2_weight:
        experts = Experts.of(layer.w13_weight.data, layer.w2_weight.data.transpose(1, 2))
        known = layer.__dict__["cpu_experts"] = (layer.w13_weight, layer.w2_weight, experts)
    experts_now: Experts = known[2]
    return experts_now


def forms_for(experts: Experts, top_k: int) -> ExpertForms:
    """The choice for experts of this shape and dtype, measured on the first ones that ask.

    Args:
        experts: one layer's.
        top_k: experts per token.

    Returns:
        The choice; the same object for the same shapes.
    """
    key = (experts.gate_up.shape, experts.gate_up.dtype, top_k)
    if key not in _measured:
        with torch.inference_mode():
            _measured[key] = measure_forms(experts, top_k)
    return _measured[key]


def measure_forms(
    experts: Experts, top_k: int, clock: Callable[[], float] = thread_clock
) -> ExpertForms:
    """Time the forms on given weights.

    Args:
        experts: one layer's.
        top_k: experts per token.
        clock: seconds.

    Returns:
        The fastest form for each range of token counts; at most ``BUDGET_S`` is spent, not counting
        the last trial.
    """
    random = torch.Generator().manual_seed(0)
    candidates = dict(FORMS)
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
            name: fastest(functools.partial(form, hidden, experts, ids, weights), clock)
            for name, form in candidates.items()
        }
        best[tokens] = min(cost, key=lambda name: cost[name])
        hopeless = {name for name in cost if cost[name] > HOPELESS * cost[best[tokens]]}
        for name in hopeless - {FOR_MANY_TOKENS}:
            del candidates[name]
        if clock() > deadline:
            break
    return _as_ranges(best)


def _as_ranges(best: dict[int, str]) -> ExpertForms:
    """Merge equal neighbours; a range ends at the geometric mean with the next count."""
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
    return ExpertForms(tuple(limits), tuple(names))
