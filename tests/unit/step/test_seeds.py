"""A seeded request without filters draws the same whether or not its neighbours filter."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.sampling.sampling_params import TOP_K_ALL

from dflash_sglang.step import seeds
from dflash_sglang.step.seeds import draw_unfiltered_alone

PROBS = torch.tensor([[0.1, 0.9], [0.6, 0.4], [0.3, 0.7]])
SEEDS, POSITIONS = torch.tensor([1, 2, 3]), torch.tensor([10, 11, 12])


def sorting_sampler(probs: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Stands for SGLang's: names what it drew, column 7 of the sorted table."""
    return torch.full((len(probs),), 7, dtype=torch.int32)


def draw(monkeypatch: Any, seed: torch.Tensor | None, **options: Any) -> list[int]:
    def alone(
        probs: torch.Tensor, sampling_seed: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        return (sampling_seed * 100 + positions).to(torch.int32)

    monkeypatch.setattr(seeds, "sampling_from_probs_torch", alone)
    top_ks = torch.tensor([TOP_K_ALL, 5, TOP_K_ALL], dtype=torch.int32)
    top_ps = torch.tensor([1.0, 1.0, 0.9])
    got: torch.Tensor = draw_unfiltered_alone(
        sorting_sampler, PROBS, top_ks, top_ps, torch.zeros(3), False, seed, POSITIONS, **options
    )
    return got.tolist()


def test_only_the_unfiltered_row_is_drawn_alone(monkeypatch: Any) -> None:
    assert draw(monkeypatch, SEEDS) == [110, 7, 7]


def test_without_seeds_sglangs_draw_stands(monkeypatch: Any) -> None:
    assert draw(monkeypatch, None) == [7, 7, 7]
