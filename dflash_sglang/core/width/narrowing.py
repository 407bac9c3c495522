"""How many tokens of a single request's block a verify is worth, by the drafter's probabilities.

The device decides (`dflash_kernels.verify_bound`), with two tables of this module: what a
probability is worth, and what verifying costs. Its decision comes back late, with the outcome.

A second of verifying must commit what a second commits on average, `rate`. So the bound of a step
that drafted `width` tokens is the n of the largest

    E[committed tokens | n tokens verified, probabilities] + rate * seconds saved(width, n)

and all of them are verified where no other n promises `hysteresis` more of a step's tokens: what
masking saves is measured, and measurements are noisy.

Which drafts are left out depends on how bad they look. Leaving them out of the statistics would
make the rest look good, so each counts with the probability that it would have been rejected.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import inf
from operator import mul
from typing import NamedTuple

from dflash_sglang.core.width.acceptance_model import Outcome, expected_commits, verify_outcome
from dflash_sglang.core.width.confidence_model import ConfidenceModel
from dflash_sglang.core.width.cost_model import CostTable
from dflash_sglang.core.width.settings import WidthSettings


class Bound(NamedTuple):
    """What the device decided for a step, and the classes it decided by."""

    verified: int  # tokens, the anchor counted
    classes: Sequence[int]  # of the probability of each draft


class BoundTables(NamedTuple):
    """What the device decides by."""

    acceptance: list[float]  # by class
    prices: list[float]  # of verifying 0 .. width - 1 drafts, in committed tokens


class Narrowing:
    """The tables of the next step, and what narrowing has gained."""

    def __init__(self, costs: CostTable, settings: WidthSettings) -> None:
        """Start with calibrated probabilities and no gain.

        Args:
            costs: of a server that measured bounded verifies.
            settings: the knobs.
        """
        self._costs = costs
        self._hysteresis = settings.hysteresis
        self._confidence = ConfidenceModel(settings.half_life)
        self._keep = 0.5 ** (1 / settings.half_life)
        self._rate = 0.0  # tokens that a second commits, when tables were last made
        self._gains: defaultdict[int, float] = defaultdict(float)  # by width, tokens a step
        self._steps: Counter[int] = Counter()

    def tables(self, width: int, limit: int, rate: float, *, free: bool) -> BoundTables:
        """What the device needs for a step.

        Args:
            width: drafted tokens, the anchor counted.
            limit: most tokens that the request may commit.
            rate: tokens that a second commits on average.
            free: verify whatever may be committed.
        """
        self._rate = rate
        price = 0.0 if free else rate
        whole = self._costs.saved_seconds(width, 1)
        prices = [
            price * (whole - self._costs.saved_seconds(width, verified))
            if verified <= limit
            else inf
            for verified in range(1, width + 1)
        ]
        # Below the others by what they must promise more.
        prices[min(limit, width) - 1] -= self._hysteresis * price * self._costs.seconds(1, width)
        return BoundTables(self._confidence.acceptance, prices)

    def gain(self, width: int) -> float:
        """Tokens a step that narrowing gains over verifying all `width` tokens; 0 if unknown."""
        return self._gains[width]

    def observe(self, bound: Bound, accept_len: int, limit: int) -> list[Outcome]:
        """Learn from a step.

        Args:
            bound: of the step.
            accept_len: drafts accepted, below `bound.verified`.
            limit: most tokens that the request could commit.

        Returns:
            What the verify showed of the drafts, and what it would have shown further on.
        """
        self._update_gain(bound, limit)
        shown = min(bound.verified, limit) - 1
        outcomes = list(self._outcomes(bound, accept_len, shown, limit))
        self._confidence.observe(bound.classes[:shown], accept_len)
        return outcomes

    def _outcomes(self, bound: Bound, accept_len: int, shown: int, limit: int) -> Iterator[Outcome]:
        seen = verify_outcome(accept_len, shown)
        if seen.rejected:
            yield seen
            return
        unshown = self._confidence.rejections(bound.classes[shown : limit - 1])
        reached = list(accumulate([1 - rejection for rejection in unshown], mul, initial=1.0))
        for i, rejection in enumerate(unshown):
            yield Outcome(shown + 1 + i, rejected=True, probability=reached[i] * rejection)
        yield Outcome(shown + len(unshown), rejected=False, probability=reached[-1])

    def _update_gain(self, bound: Bound, limit: int) -> None:
        width = len(bound.classes) + 1
        commits = expected_commits(self._confidence.rejections(bound.classes), limit)
        lost = commits[width] - commits[bound.verified]
        gain = self._rate * self._costs.saved_seconds(width, bound.verified) - lost
        self._steps[width] += 1
        weight = max(1 - self._keep, 1 / self._steps[width])
        self._gains[width] += weight * (gain - self._gains[width])
