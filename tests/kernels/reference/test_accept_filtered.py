"""The reference of `accept_filtered`: the kept tokens by a plain loop, and the law of the draws."""

import math

import pytest
import torch
from dflash_kernels.accept_filtered import accept_filtered
from dflash_kernels.accept_filtered.reference import kept
from dflash_kernels.accept_sampled import accept_sampled
from dflash_kernels.types import Filters
from torch import Tensor

from dflash_sglang.core import distribution

ALL = 2**30  # top-k of a request that does not filter by it


def filters(*rows: tuple[int, float, float]) -> Filters:
    top_ks, top_ps, min_ps = zip(*rows, strict=True)
    return Filters(
        torch.tensor(top_ks, dtype=torch.int32), torch.tensor(top_ps), torch.tensor(min_ps)
    )


def kept_by_loop(scaled: list[float], top_k: int, top_p: float, min_p: float) -> list[bool]:
    """The definition, token by token, in Python's float64."""
    weights = [math.exp(x - max(scaled)) for x in scaled]
    found = []
    for x, weight in zip(scaled, weights, strict=True):
        above = [w for y, w in zip(scaled, weights, strict=True) if y > x]
        by_mass = top_p >= 1 or sum(above) < top_p * sum(weights)
        found.append(len(above) < top_k and by_mass and weight >= min_p)
    return found


@pytest.mark.parametrize("levels", [3, 1000], ids=["ties", "no ties"])
def test_the_kept_tokens_are_those_of_the_definition(levels: int) -> None:
    generator = torch.Generator().manual_seed(levels)
    rows = [(k, p, m) for k in (1, 3, 7, ALL) for p in (0.05, 0.5, 0.93, 1.0) for m in (0.0, 0.3)]
    scaled = torch.randint(0, levels, (len(rows), 2, 12), generator=generator) * (6 / levels)
    got = kept(scaled, filters(*rows))
    for row, (top_k, top_p, min_p) in enumerate(rows):
        # As float32 keeps it: 0.05 is not the float64 of that name.
        limits = float(torch.tensor(top_p)), float(torch.tensor(min_p))
        for column in range(2):
            expected = kept_by_loop(scaled[row, column].tolist(), top_k, *limits)
            assert got[row, column].tolist() == expected


def test_without_ties_they_are_those_of_sglangs_torch_sampler() -> None:
    generator = torch.Generator().manual_seed(5)
    rows = [(k, p, m) for k in (2, 9, ALL) for p in (0.2, 0.7, 1.0) for m in (0.0, 0.05)]
    logits = 2 * torch.randn(len(rows), 1, 200, generator=generator)
    given = filters(*rows)
    probs = distribution.verifier_probs(
        logits[:, 0],
        distribution.Filters(torch.ones(len(rows), 1), *given, any_set=True),
    )
    assert torch.equal(kept(logits, given)[:, 0], probs > 0)


def test_the_draws_follow_the_filtered_law() -> None:
    count, temperature = 40_000, 0.8
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(1, 10, generator=generator)
    given = filters((6, 0.9, 0.02))
    expected = distribution.verifier_probs(
        logits,
        distribution.Filters(torch.full((1, 1), temperature), *given, any_set=True),
    )[0]
    got = accept_filtered(
        logits.repeat(count, 1),
        torch.zeros(count, 1, dtype=torch.int64),
        torch.arange(count),
        torch.full((count,), temperature),
        torch.full((count,), 12345),
        Filters(*(values.repeat(count) for values in given)),
    )
    drawn = got.bonus_ids.bincount(minlength=10)
    assert (drawn[expected == 0] == 0).all()
    # Five standard deviations of each count: of six tokens one in 300,000 runs is further off.
    error = (drawn - count * expected).abs()
    assert (error <= 5 * (count * expected * (1 - expected)).sqrt()).all()


def unfiltered(bs: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(9)
    return (
        torch.randn(bs * 3, 500, generator=generator),
        torch.randint(0, 500, (bs, 3), generator=generator),
        torch.arange(bs),
        torch.tensor([0.0, 0.7] * bs)[:bs],
        torch.arange(bs) + 3,
    )


def test_requests_that_do_not_filter_draw_what_accept_sampled_gives_them() -> None:
    given = unfiltered(8)
    got = accept_filtered(*given, filters(*[(ALL, 1.0, 0.0)] * 8))
    assert all(map(torch.equal, got, accept_sampled(*given)))


def test_a_greedy_request_is_not_filtered() -> None:
    given = unfiltered(2)
    got = accept_filtered(*given, filters((1, 0.1, 1.0), (ALL, 1.0, 0.0)))
    assert torch.equal(got.output_ids[0], given[0][:3].argmax(dim=1))
