"""Proposals from a head that is padded, or split over ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dflash_sglang.step.draft import tail as draft_tail
from dflash_sglang.step.draft.tail import DraftTail

BLOCK, HIDDEN, VOCABULARY = 4, 8, 40


def head(weight: Tensor, num_ids: int, first_id: int = 0) -> Any:
    """SGLang's head over part of a vocabulary; rows past `num_ids` are padding."""
    linear = nn.Linear(HIDDEN, len(weight), bias=False)
    linear.weight = nn.Parameter(weight)
    return SimpleNamespace(
        parameters=linear.parameters,
        quant_method=SimpleNamespace(apply=lambda _, x, bias: linear(x)),
        shard_indices=SimpleNamespace(num_org_elements=num_ids, org_vocab_start_index=first_id),
    )


def make(lm_head: Any, top_k: int, monkeypatch: Any, group: Any = None) -> DraftTail:
    group = group or SimpleNamespace(world_size=1)
    monkeypatch.setattr(draft_tail, "get_parallel", lambda: SimpleNamespace(tp_group=group))
    return DraftTail(lm_head, BLOCK, max_batch_size=3, top_k=top_k)


def weights() -> Tensor:
    # Few distinct numbers: logits repeat, within a part and between parts.
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-1, 2, (VOCABULARY, HIDDEN), generator=generator).float()


def hidden() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-1, 2, (2 * BLOCK, HIDDEN), generator=generator).float()


def best(x: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Of every position but the anchor's, the smallest id first among equals."""
    logits = x.view(2, BLOCK, HIDDEN)[:, 1:] @ weights().T
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    return ids[..., :top_k], values[..., :top_k]


@pytest.mark.parametrize("top_k", [1, 5])
def test_padding_is_never_proposed(top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    padded = torch.cat([weights(), torch.full((24, HIDDEN), 9.0)])
    tail = make(head(padded, VOCABULARY), top_k, monkeypatch)
    got = tail.top(hidden())
    ids, values = best(hidden(), top_k)
    assert torch.equal(got.ids, ids)
    assert torch.equal(got.logits, values)


@pytest.mark.parametrize("top_k", [1, 5])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_propose_what_one_would(
    ranks: int, top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = VOCABULARY // ranks
    parts = [head(part, size, size * rank) for rank, part in enumerate(weights().split(size))]
    alone = [make(part, top_k, monkeypatch).top(hidden()) for part in parts]

    class Group:
        """Gathers what the ranks sent: values, then ids."""

        world_size = ranks

        def __init__(self) -> None:
            self.calls = 0

        def all_gather(self, mine: Tensor, dim: int) -> Tensor:
            self.calls += 1
            if self.calls == 1:
                return torch.cat([one.logits.flatten(0, 1) for one in alone], dim)
            assert torch.equal(mine, alone[1].ids.flatten(0, 1) + size)
            ids = [one.ids.flatten(0, 1) + size * rank for rank, one in enumerate(alone)]
            return torch.cat(ids, dim)

    got = make(parts[1], top_k, monkeypatch, Group()).top(hidden())
    ids, values = best(hidden(), top_k)
    assert torch.equal(got.ids, ids)
    assert torch.equal(got.logits, values)


def test_a_graphs_proposals_stay_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    tail = make(head(weights(), VOCABULARY), 1, monkeypatch)
    address = tail.kept(2).ids.data_ptr()
    tail(hidden())
    kept = tail.kept(2)
    assert kept.ids.data_ptr() == address
    assert torch.equal(kept.ids, best(hidden(), 1)[0])
