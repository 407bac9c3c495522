"""What the drafter's confidence says about a draft before it is verified.

The probability that the drafter gives its own draft falls into one of a few classes. Of each class,
the share of drafts that were rejected, those before them accepted, is learned while serving; until
then the drafter is taken at its word.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from itertools import pairwise

# Finer towards 1, where most drafts lie and where a block of 15 tells .99 from .999.
BOUNDS = (0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
# Drafts whose evidence the drafter's own word counts as.
PRIOR = 4.0


class Confidence:
    """Probability of rejection by class of confidence."""

    def __init__(self, half_life: float) -> None:
        """Start with the drafter's word.

        Args:
            half_life: steps after which what a step showed weighs half.
        """
        self._keep = 0.5 ** (1 / half_life)
        edges = (0.0, *BOUNDS, 1.0)
        self._start = [1 - (low + high) / 2 for low, high in pairwise(edges)]
        self._rejections = [0.0] * len(self._start)
        self._at_risk = [0.0] * len(self._start)

    def rejections(self, confidences: Sequence[float]) -> list[float]:
        """Probability of each draft that it is rejected if those before it are accepted.

        Args:
            confidences: the drafter's probability of each draft of a block.
        """
        return [self._rejection(bisect(BOUNDS, value)) for value in confidences]

    def observe(self, confidences: Sequence[Sequence[float]], accept_lens: Sequence[int]) -> None:
        """Learn from a verified step.

        Args:
            confidences: of every request's drafts that the verify showed.
            accept_lens: drafts accepted of each.
        """
        self._at_risk = [self._keep * n for n in self._at_risk]
        self._rejections = [self._keep * n for n in self._rejections]
        for row, accept_len in zip(confidences, accept_lens, strict=True):
            for i, value in enumerate(row[: accept_len + 1]):
                chosen = bisect(BOUNDS, value)
                self._at_risk[chosen] += 1
                self._rejections[chosen] += i == accept_len

    def _rejection(self, chosen: int) -> float:
        rejections = self._rejections[chosen] + PRIOR * self._start[chosen]
        return rejections / (self._at_risk[chosen] + PRIOR)


def expected_commits(rejections: Sequence[float], limit: int) -> list[float]:
    """Expected committed tokens of a request by verified width 0 .. len(rejections) + 1.

    Args:
        rejections: of each draft, if those before it are accepted.
        limit: most tokens that the request commits.
    """
    committed, survival = [0.0, 1.0], 1.0
    for width, rejection in enumerate(rejections, 2):
        survival *= 1 - rejection
        committed.append(committed[-1] + (survival if width <= limit else 0.0))
    return committed
