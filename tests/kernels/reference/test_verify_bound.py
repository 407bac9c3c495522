"""`verify_bound` against a plain loop over all bounds, in Python's float64."""

from math import exp, inf
from random import Random

import pytest
import torch
from dflash_kernels.verify_bound import CLASSES, EDGES, verify_bound


def by_loop(
    confidences: list[float], acceptance: list[float], prices: list[float]
) -> tuple[int, list[int], float]:
    """The best number of drafts, their classes, and how much worse the second best is."""
    classes = [sum(edge <= one for edge in EDGES) for one in confidences]
    worths = []
    for drafts in range(len(confidences) + 1):
        expected = 0.0
        for first in range(drafts):
            survival = 1.0
            for k in classes[: first + 1]:
                survival *= acceptance[k]
            expected += survival
        worths.append(expected - prices[drafts])
    best = max(range(len(worths)), key=lambda d: (worths[d], d))
    others = [one for d, one in enumerate(worths) if d != best]
    return best, classes, worths[best] - max(others, default=-inf)


@pytest.mark.parametrize("drafts", [1, 2, 7, 15, 31])
def test_the_best_number_of_drafts(drafts: int) -> None:
    rng = Random(drafts)
    decided = set()
    for _ in range(300):
        # Logits far from 0: only their distance to the normaliser counts.
        confidences = [1 - rng.random() ** 4 for _ in range(drafts)]
        lse = torch.tensor([rng.uniform(-50, 50) for _ in confidences])
        values = lse + torch.tensor(confidences).log()
        seen = [exp(float(v) - float(z)) for v, z in zip(values, lse, strict=True)]
        acceptance = torch.rand(CLASSES, generator=torch.Generator().manual_seed(drafts))
        acceptance = acceptance.sqrt()
        slope = rng.choice([0.02, 0.1, 0.4])
        prices = torch.tensor([slope * d for d in range(drafts + 1)])
        best, classes, margin = by_loop(seen, acceptance.tolist(), prices.tolist())
        nearest = min(abs(c - edge) for c in seen for edge in EDGES)
        if margin < 1e-5 or nearest < 1e-5:  # float32 may round either way
            continue
        got = verify_bound(values, lse, acceptance, prices).tolist()
        assert got == [best + 1, best, *classes]
        decided.add(best)
    assert len(decided) > min(drafts, 3)


def test_a_higher_price_never_verifies_more() -> None:
    confidences = torch.tensor([0.999, 0.97, 0.9, 0.99, 0.5, 0.8])
    acceptance = torch.linspace(0.1, 0.98, CLASSES)
    bounds = []
    for slope in (0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.0):
        prices = slope * torch.arange(7, dtype=torch.float32)
        bounds.append(int(verify_bound(confidences.log(), torch.zeros(6), acceptance, prices)[0]))
    assert bounds == sorted(bounds, reverse=True)
    assert (bounds[0], bounds[-1]) == (7, 1)


@pytest.mark.parametrize(
    ("name", "shape"), [("lse", (3,)), ("acceptance", (CLASSES + 1,)), ("prices", (4,))]
)
def test_shapes_that_do_not_fit_are_refused(name: str, shape: tuple[int, ...]) -> None:
    given = {
        "values": torch.zeros(4),
        "lse": torch.zeros(4),
        "acceptance": torch.ones(CLASSES),
        "prices": torch.zeros(5),
    }
    with pytest.raises(ValueError, match=f"expected {name} of shape"):
        verify_bound(**{**given, name: torch.zeros(shape)})


def test_bfloat16_is_refused() -> None:
    given = (torch.zeros(4), torch.ones(CLASSES), torch.zeros(5))
    with pytest.raises(TypeError, match="expected values of dtype"):
        verify_bound(torch.zeros(4, dtype=torch.bfloat16), *given)
