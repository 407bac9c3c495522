"""How many tokens a request will commit, from how its drafts and everyone's have fared.

Draft i (1 .. block_size - 1) of request r, all drafts before it accepted, is rejected with
probability

    q[r, i] = min(1, m[r] * q[i])

q is the server's rejection curve and m the request's *difficulty*, 1 for an average request. A
curve for each request would need hundreds of its own steps; one number is known after a few.

A step of width w shows only drafts 1 .. w - 1: with accept length a it shows a acceptances and, if
a < w - 1, one rejection; a == w - 1 shows nothing of draft w. Both estimates are ratios of
rejections to what was at risk, so that unseen drafts enter neither side.

    q[i] = rejections at i / sum of m over the requests whose draft i was seen
    m[r] = (K + rejections of r) / (K + sum of q over the drafts of r that were seen)

Sources: q is estimated as in Breslow (1972), with m as the relative risk; m as the mean of a gamma
frailty of mean 1 and shape K given what was seen (Vaupel, Manton and Stallard, 1979).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate
from math import sqrt
from operator import mul
from typing import NamedTuple

import numpy as np

from dflash_sglang.core.width.difficulty import (
    STEPS_PER_OCTAVE,
    Difficulties,
    Groups,
)

START_REJECTION = 0.2  # before anything was seen: optimistic, so that the first steps draft
# The curve's prior at a position, in steps; it is the position before, because acceptance along a
# block changes slowly and a position that was never seen has to get a value.
CURVE_PRIOR = 0.5
# However long nothing was seen, the curve keeps this many steps of evidence: enough to remember
# that drafts were bad, little enough to be outvoted by a few new ones.
CURVE_FLOOR = 4.0
# Only products m * q are seen. The mean m of a batch is therefore drawn to 1, as if this many
# average requests were among them: nearly all the way in a large batch, hardly for one request, so
# that its bad luck is not counted in both m and q.
AVERAGE_REQUESTS = 8
FEW = 4  # requests that are learned from one by one: faster than the calls of numpy for all


class Outcome(NamedTuple):
    """What a verify shows of one request's drafts."""

    last_seen: int  # position of the last draft with a known outcome, 0 for none
    rejected: bool  # whether that draft was rejected
    probability: float = 1.0  # of this outcome, where several are possible


class AcceptanceModel:
    """Rejection curve of the server and difficulty of each running request."""

    def __init__(self, block_size: int, half_life: float) -> None:
        """Start with the prior.

        Args:
            block_size: tokens of a block, the anchor counted.
            half_life: steps after which what a request showed weighs half. Of the curve, which
                n requests show at once, as precise an estimate takes fewer steps: it forgets
                sqrt(n) times as fast, the best compromise for a truth that drifts at random.
        """
        self._block_size = block_size
        self._half_life = half_life
        self._difficulties = Difficulties(block_size, keep=0.5 ** (1 / half_life))
        # Both by position 1 .. block_size - 1, as means over the batch: evidence counts in steps.
        self._rejections = [0.0] * block_size
        self._at_risk = [0.0] * block_size
        self._update_curve()

    def limit(self, key: Hashable, max_width: int) -> None:
        """Commit at most this many tokens of a request in a step; 1 is no speculation for it."""
        self._difficulties.put(key, max_width)

    def forget(self, key: Hashable) -> None:
        """Drop a finished request; one that was never seen is fine."""
        self._difficulties.forget(key)

    def groups(self, keys: Sequence[Hashable]) -> Groups:
        """Group requests by expected commits; new ones are added as average."""
        return self._difficulties.groups(keys)

    def expected_commit(self, groups: Groups, width: int) -> float:
        """Expected tokens that all these requests together commit in a step of this width."""
        rows, total = self._rows, 0.0
        for (difficulty, max_width), count in groups.items():
            total += count * rows[difficulty][width if width < max_width else max_width]
        return total

    def most_commit(self, groups: Groups, known: int, width: int) -> float:
        """What they would commit if every draft past those of width `known` were accepted."""
        total = 0.0
        for (difficulty, max_width), count in groups.items():
            row, from_width = self._rows[difficulty], min(known, max_width)
            reached = row[from_width] - row[from_width - 1]  # P(all known drafts are accepted)
            total += count * (row[from_width] + reached * (min(width, max_width) - from_width))
        return total

    def observe(self, keys: Sequence[Hashable], accept_lens: Sequence[int], width: int) -> None:
        """Learn from a verified step, however late.

        Args:
            keys: the requests of the step; those that were forgotten still count for the server.
            accept_lens: drafts accepted of each, below `width`.
            width: verified tokens of each, the anchor counted.
        """
        known = self._difficulties
        rows = known.rows(keys)
        if len(rows) <= FEW:
            shown_by = (min(width, most) - 1 for most in known.max_widths(rows).tolist())
            seen = map(verify_outcome, accept_lens, shown_by)
            self.observe_outcomes(keys, [[one] for one in seen])
            return
        accepted = np.array(accept_lens, dtype=np.intp)
        shown = np.minimum(known.max_widths(rows), width) - 1
        # As `verify_outcome`.
        last_seen, rejected = np.minimum(accepted + 1, shown), accepted < shown
        positions = self._block_size + 1
        rejections = np.bincount(last_seen, rejected, positions).tolist()
        at_risk = np.bincount(last_seen, known.of(rows), positions).tolist()
        known.learn(rows, rejected, np.array(self._risk_up_to)[last_seen])
        showing = int(np.count_nonzero(last_seen))
        self._learn(len(rows), showing, rejections, at_risk)

    def observe_outcomes(
        self, keys: Sequence[Hashable], outcomes: Sequence[Sequence[Outcome]]
    ) -> None:
        """Learn from the possible outcomes of a step, whose probabilities add up to 1.

        Args:
            keys: as in `observe`.
            outcomes: of each request.
        """
        known, positions = self._difficulties, self._block_size + 1
        rows = known.rows(keys)
        rejections, at_risk = [0.0] * positions, [0.0] * positions
        showing = 0
        for row, difficulty, possible in zip(
            rows.tolist(), known.of(rows).tolist(), outcomes, strict=True
        ):
            rejected, risk = 0.0, 0.0
            for last_seen, was_rejected, probability in possible:
                at_risk[last_seen] += difficulty * probability
                risk += self._risk_up_to[last_seen] * probability
                if was_rejected:
                    rejections[last_seen] += probability
                    rejected += probability
            known.learn(row, rejected, risk)
            showing += any(one.last_seen > 0 for one in possible)
        self._learn(len(rows), showing, rejections, at_risk)

    def _learn(
        self, requests: int, showing: int, rejections: list[float], at_risk: list[float]
    ) -> None:
        """Add a step to the curve.

        Args:
            requests: of the step.
            showing: those of them of whose drafts it shows something.
            rejections: by position, of all of them; 0 stands for no draft.
            at_risk: their difficulty, at the last draft that each shows.
        """
        self._age(0.5 ** (sqrt(requests) / self._half_life))
        if showing:
            mean = (sum(at_risk[1:]) + AVERAGE_REQUESTS) / (showing + AVERAGE_REQUESTS)
            self._add([n / showing for n in rejections], [n / showing / mean for n in at_risk])
        self._update_curve()

    def max_width(self, key: Hashable) -> int:
        """Most tokens that a request may commit in a step."""
        return int(self._difficulties.max_widths(self._difficulties.rows([key]))[0])

    def _age(self, keep: float) -> None:
        for i in range(1, self._block_size):
            if self._at_risk[i] > CURVE_FLOOR:
                self._at_risk[i] *= keep
                self._rejections[i] *= keep

    def _add(self, rejections: list[float], last_seen: list[float]) -> None:
        """Add a step; `last_seen` holds each request at the last draft that it showed."""
        at_risk = 0.0
        for i in range(self._block_size - 1, 0, -1):
            at_risk += last_seen[i]
            self._at_risk[i] += at_risk
            self._rejections[i] += rejections[i]

    def _update_curve(self) -> None:
        before = START_REJECTION
        self._curve = [0.0] * self._block_size
        for i in range(1, self._block_size):
            rejections = self._rejections[i] + CURVE_PRIOR * before
            before = min(1.0, rejections / (self._at_risk[i] + CURVE_PRIOR))
            self._curve[i] = before
        self._risk_up_to = list(accumulate(self._curve))
        self._rows = CommitRows(self._curve[1:])


class CommitRows(dict[int, list[float]]):
    """By class of difficulty, expected committed tokens by width 0 .. block_size."""

    def __init__(self, rejections: Sequence[float]) -> None:
        """No row is known yet.

        Args:
            rejections: of the drafts of an average request.
        """
        super().__init__()
        self._rejections = rejections

    def __missing__(self, difficulty_class: int) -> list[float]:
        difficulty = 2 ** (difficulty_class / STEPS_PER_OCTAVE)
        scaled = [difficulty * rejection for rejection in self._rejections]
        row = expected_commits([one if one < 1 else 1.0 for one in scaled], len(scaled) + 1)
        self[difficulty_class] = row
        return row


def verify_outcome(accept_len: int, shown: int) -> Outcome:
    """The outcome of a verify of `shown` drafts of which the first `accept_len` were accepted."""
    if accept_len < shown:
        return Outcome(accept_len + 1, rejected=True)
    return Outcome(shown, rejected=False)


def expected_commits(rejections: Sequence[float], limit: int) -> list[float]:
    """Expected committed tokens of a request by verified width 0 .. len(rejections) + 1.

    Args:
        rejections: probability of each draft to be rejected if those before it are accepted.
        limit: most tokens that the request commits.
    """
    reached = list(accumulate([1 - rejection for rejection in rejections], mul))
    reached[limit - 1 :] = [0.0] * len(reached[limit - 1 :])
    return [0.0, *accumulate(reached, initial=1.0)]
