"""From the drafter's probability of a draft to the draft's probability of rejection.

The drafter's probabilities are sorted into a few classes. The share of rejected drafts of each
class, those before them accepted, is learned from verifies; the prior is that the drafter's
probabilities are calibrated.
"""

from bisect import bisect
from collections.abc import Sequence
from itertools import pairwise

# Finer towards 1, where most drafts lie and where a block of 15 tells .99 from .999.
BOUNDS = (0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
# Weight of the prior, in drafts.
PRIOR = 4.0


class ConfidenceModel:
    """Probability of rejection by class of the drafter's probability."""

    def __init__(self, half_life: float) -> None:
        """Start with calibrated probabilities.

        Args:
            half_life: steps after which an observed step weighs half.
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
