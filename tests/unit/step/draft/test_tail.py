"""Proposals from a head that is padded, or split over ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dflash_kernels.verify_bound import CLASSES
from torch import Tensor, nn

from dflash_sglang.errors import PairError
from dflash_sglang.step.draft import tail as draft_tail
from dflash_sglang.step.draft.narrowing import VerifyBound
from dflash_sglang.step.draft.tail import DraftTail

BLOCK, HIDDEN, VOCABULARY = 4, 8, 40


def head(weight: Tensor, num_ids: int, first_id: int = 0) -> Any:
    """SGLang's head over part of a vocabulary; rows past `num_ids` are padding."""
    linear = nn.Linear(HIDDEN, len(weight), bias=False)
    linear.weight = nn.Parameter(weight)
    return SimpleNamespace(
        weight=linear.weight,
        parameters=linear.parameters,
        quant_method=SimpleNamespace(apply=lambda _, x, bias: linear(x)),
        shard_indices=SimpleNamespace(num_org_elements=num_ids, org_vocab_start_index=first_id),
    )


def make(
    lm_head: Any, top_k: int, monkeypatch: Any, group: Any = None, bound: VerifyBound | None = None
) -> DraftTail:
    group = group or SimpleNamespace(world_size=1)
    monkeypatch.setattr(draft_tail, "get_parallel", lambda: SimpleNamespace(tp_group=group))
    return DraftTail(lm_head, BLOCK, max_batch_size=3, top_k=top_k, bound=bound)


class Group:
    """Of ranks of which each has a part of the vocabulary; gathers what all of them send."""

    def __init__(self, ranks: int) -> None:
        self.world_size = ranks
        self.sent: list[Tensor] = []  # by all ranks, when each has been asked
        self.calls = 0

    def all_gather(self, mine: Tensor, dim: int) -> Tensor:
        self.calls += 1
        if len(self.sent) < self.world_size:
            self.sent.append(mine)
            return torch.cat([mine] * self.world_size, dim)
        assert any(torch.equal(mine, one) for one in self.sent)
        return torch.cat(self.sent, dim)


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
def test_ranks_propose_what_one_would_and_gather_once(
    ranks: int, top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, group = VOCABULARY // ranks, Group(ranks)
    tails = [
        make(head(part, size, size * rank), top_k, monkeypatch, group)
        for rank, part in enumerate(weights().split(size))
    ]
    for tail in tails:
        tail.top(hidden())  # what each sends
    group.calls = 0
    got = tails[1].top(hidden())
    assert group.calls == 1
    ids, values = best(hidden(), top_k)
    assert torch.equal(got.ids, ids)
    assert torch.equal(got.logits, values)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_single_requests_bound_follows_its_probabilities(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over all ranks: the normaliser of one rank's part would make its drafts look too likely."""
    size, group = VOCABULARY // ranks, Group(ranks)
    bound = VerifyBound([BLOCK], "cpu")
    # Only a probability of .999 is worth anything.
    bound.set_tables(BLOCK, [*[0.0] * (CLASSES - 1), 1.0, 0.0, 0.5, 1.0, 1.5])
    # Large logits, so that most likely tokens are certain; ties are not.
    tails = [
        make(head(20 * part, size, size * rank), 1, monkeypatch, group, bound)
        for rank, part in enumerate(weights().split(size))
    ]
    alone = hidden()[:BLOCK]
    logits = 20 * alone[1:] @ weights().T
    certain = (logits.softmax(-1).amax(-1) >= 0.999).tolist()
    expected = 1 + (certain.index(False) if False in certain else len(certain))
    for _ in range(2):  # at first a rank has only its own part
        for tail in tails:
            tail.top(alone)
    assert int(bound.tokens) == expected
    assert bound.limit.tolist() == [expected - 1]


def test_a_batch_leaves_the_bound_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = VerifyBound([BLOCK], "cpu")
    bound.set_tables(BLOCK, [*[0.0] * CLASSES, 0.0, 1.0, 1.0, 1.0])
    tail = make(head(weights(), VOCABULARY), 1, monkeypatch, bound=bound)
    tail.top(hidden())
    assert int(bound.tokens) == BLOCK
    tail.top(hidden()[:BLOCK])
    assert int(bound.tokens) == 1


def test_a_float32_head_takes_a_bfloat16_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    tail = make(head(weights(), VOCABULARY), 1, monkeypatch)
    got = tail.top(hidden().bfloat16())
    ids, values = best(hidden(), 1)
    assert torch.equal(got.ids, ids)
    assert torch.equal(got.logits, values)


def test_a_head_without_shard_indices_serves_one_rank_only(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = head(weights(), VOCABULARY)
    del plain.shard_indices
    got = make(plain, 1, monkeypatch).top(hidden())
    assert torch.equal(got.ids, best(hidden(), 1)[0])
    with pytest.raises(PairError, match="which token ids each of 2 ranks has"):
        make(plain, 1, monkeypatch, Group(2))


def test_a_graphs_proposals_stay_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    tail = make(head(weights(), VOCABULARY), 1, monkeypatch)
    address = tail.kept(2).ids.data_ptr()
    tail(hidden())
    kept = tail.kept(2)
    assert kept.ids.data_ptr() == address
    assert torch.equal(kept.ids, best(hidden(), 1)[0])
