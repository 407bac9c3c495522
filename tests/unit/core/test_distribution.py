"""The probabilities that rejection rules use against the weights of SGLang's own sampler."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch
from sglang.srt.sampling.sampling_params import TOP_K_ALL

from dflash_sglang.core.distribution import Filters, verifier_probs

VOCAB = 97
CASES = {
    "temperature": (0.7, TOP_K_ALL, 1.0, 0.0),
    "greedy": (1.0, 1, 1.0, 0.0),
    "top-k": (1.3, 5, 1.0, 0.0),
    "top-p": (1.0, TOP_K_ALL, 0.8, 0.0),
    "min-p": (2.0, TOP_K_ALL, 1.0, 0.1),
    "joint": (1.5, 40, 0.7, 0.02),
    "top-k above the vocabulary": (1.0, VOCAB + 5, 0.95, 0.0),
}


def filters_of(names: list[str]) -> Filters:
    rows = [CASES[name] for name in names]
    return Filters(
        temperatures=torch.tensor([[row[0]] for row in rows]),
        top_ks=torch.tensor([row[1] for row in rows], dtype=torch.int32),
        top_ps=torch.tensor([row[2] for row in rows]),
        min_ps=torch.tensor([row[3] for row in rows]),
        any_set=any(row[1:] != (TOP_K_ALL, 1.0, 0.0) for row in rows),
    )


def sglang_weights(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    _, weights, ids, _ = top_k_top_p_min_p_sampling_from_probs_torch(
        torch.softmax(logits / filters.temperatures, dim=-1),
        filters.top_ks,
        filters.top_ps,
        filters.min_ps,
        True,
        None,
        torch.zeros(len(logits), dtype=torch.int64),
        return_filtered_probs=True,
    )
    whole = torch.zeros_like(logits).scatter_(1, ids.long(), weights)
    return whole / whole.sum(dim=1, keepdim=True)


@pytest.mark.parametrize("names", [[name] for name in CASES] + [list(CASES)], ids=str)
def test_the_distribution_of_the_ordinary_sampler(names: list[str]) -> None:
    filters = filters_of(names)
    logits = 2 * torch.randn(len(names), VOCAB, generator=torch.Generator().manual_seed(1))
    got = verifier_probs(logits, filters)
    expected = sglang_weights(logits, filters)
    assert torch.equal(got > 0, expected > 0)
    # float32: one division by the sum, in another order of summation.
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(got.sum(dim=1), torch.ones(len(names)))
