"""From the drafter's probability of a draft to the probability that it is accepted.

The op `verify_bound` sorts the drafter's probabilities into a few classes. The share of rejected
drafts of each class, those before them accepted, is learned from verifies; the prior is that the
drafter's probabilities are calibrated.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from dflash_kernels.verify_bound import EDGES

PRIOR = 4.0  # its weight, in drafts


class ConfidenceModel:
    """Probability of rejection by class."""

    def __init__(self, half_life: float) -> None:
        """Start with calibrated probabilities.

        Args:
            half_life: steps after which an observed step weighs half.
        """
        self._keep = 0.5 ** (1 / half_life)
        self._prior = [PRIOR * (1 - (low + high) / 2) for low, high in pairwise((0.0, *EDGES, 1.0))]
        self._rejections = [0.0] * len(self._prior)
        self._at_risk = [0.0] * len(self._prior)
        self._update()

    @property
    def acceptance(self) -> list[float]:
        """Of each class: P(a draft is accepted | those before it are)."""
        return [1 - rejection for rejection in self._by_class]

    def rejections(self, classes: Sequence[int]) -> list[float]:
        """Probability of each draft that it is rejected if those before it are accepted.

        Args:
            classes: of the drafts of a block.
        """
        return [self._by_class[chosen] for chosen in classes]

    def observe(self, classes: Sequence[int], accept_len: int) -> None:
        """Learn from a verified block.

        Args:
            classes: of the drafts that the verify showed.
            accept_len: how many of them were accepted.
        """
        self._at_risk = [self._keep * n for n in self._at_risk]
        self._rejections = [self._keep * n for n in self._rejections]
        for chosen in classes[: accept_len + 1]:
            self._at_risk[chosen] += 1
        if accept_len < len(classes):
            self._rejections[classes[accept_len]] += 1
        self._update()

    def _update(self) -> None:
        self._by_class = [
            (rejections + prior) / (at_risk + PRIOR)
            for rejections, prior, at_risk in zip(
                self._rejections, self._prior, self._at_risk, strict=True
            )
        ]
