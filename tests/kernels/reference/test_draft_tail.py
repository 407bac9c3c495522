"""The draft tail's reference against plain loops, and what a rank's part tells the others."""

import math

import pytest
import torch
from dflash_kernels.draft_tail import draft_tail


def test_against_a_loop_over_small_integers() -> None:
    # Few distinct values: an order of ties other than by id would show.
    generator = torch.Generator().manual_seed(1)
    logits = torch.randint(-2, 3, (20, 11), generator=generator).to(torch.bfloat16)
    got = draft_tail(logits, num_ids=9, top=4)
    for row, values in enumerate(logits[:, :9].tolist()):
        best = sorted(range(9), key=lambda v: (-values[v], v))[:4]
        total = sum(math.exp(value) for value in values)
        assert got.ids[row].tolist() == best
        assert got.values[row].tolist() == [values[v] for v in best]
        # float32 against Python's float64: nine terms, a few 2**-24 of each.
        assert got.lse[row].item() == pytest.approx(math.log(total), abs=1e-6)
        for prob, v in zip(got.probs[row].tolist(), best, strict=True):
            assert prob == pytest.approx(math.exp(values[v]) / total, rel=1e-5)


def test_ids_are_argmax_for_the_most_likely_token() -> None:
    logits = torch.randn(7, 1000, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    assert torch.equal(draft_tail(logits, num_ids=1000).ids[:, 0], logits.float().argmax(1))


def test_nan_is_never_chosen() -> None:
    got = draft_tail(torch.tensor([[torch.nan, 1.0], [torch.nan, -torch.inf]]), num_ids=2)
    assert got.ids[0].tolist() == [1]
    assert got.lse.tolist() == [1.0, -torch.inf]


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_parts_of_a_sharded_vocabulary_give_the_whole(ranks: int) -> None:
    generator = torch.Generator().manual_seed(ranks)
    logits = torch.randint(-3, 4, (50, 64), generator=generator).to(torch.bfloat16)
    parts = [draft_tail(part, num_ids=64 // ranks) for part in logits.chunk(ranks, dim=1)]

    values = torch.stack([part.values[:, 0] for part in parts])  # [ranks, rows]
    ids = torch.stack([part.ids[:, 0] + 64 // ranks * rank for rank, part in enumerate(parts)])
    lse = torch.stack([part.lse for part in parts]).logsumexp(0)
    owner = values.argmax(0, keepdim=True)  # the lowest rank among equals

    whole = draft_tail(logits, num_ids=64)
    assert torch.equal(ids.gather(0, owner)[0], whole.ids[:, 0])
    torch.testing.assert_close(lse, whole.lse)  # float32 sums in another order


@pytest.mark.parametrize(("num_ids", "top"), [(10, 0), (10, 33), (3, 4), (11, 1)])
def test_sizes_out_of_range_are_refused(num_ids: int, top: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        draft_tail(torch.zeros(2, 10), num_ids=num_ids, top=top)
