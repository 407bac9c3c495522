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

from bisect import bisect
from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import accumulate
from math import sqrt
from typing import NamedTuple

START_REJECTION = 0.2  # before anything was seen: optimistic, so that the first steps draft
# The curve's prior at a position, in steps; it is the position before, because acceptance along a
# block changes slowly and a position that was never seen has to get a value.
CURVE_PRIOR = 0.5
# However long nothing was seen, the curve keeps this many steps of evidence: enough to remember
# that drafts were bad, little enough to be outvoted by a few new ones.
CURVE_FLOOR = 4.0
DIFFICULTY_PRIOR = 8.0  # K: rejections after which a request outweighs the average one
# Only products m * q are seen. The mean m of a batch is therefore drawn to 1, as if this many
# average requests were among them: nearly all the way in a large batch, hardly for one request, so
# that its bad luck is not counted in both m and q.
AVERAGE_REQUESTS = 8
STEPS_PER_OCTAVE = 3  # difficulties are rounded to 2 ** (n / 3), so that requests share a table row
WIDEST_CLASS = 3 * STEPS_PER_OCTAVE  # difficulties between 1/8 and 8
BOUNDS = [2 ** ((n + 0.5) / STEPS_PER_OCTAVE) for n in range(-WIDEST_CLASS, WIDEST_CLASS)]

# How many requests share (class of difficulty, max_width), and so their expected commits.
Groups = Counter[tuple[int, int]]


class Outcome(NamedTuple):
    """What a verify shows of one request's drafts."""

    last_seen: int  # position of the last draft with a known outcome, 0 for none
    rejected: bool  # whether that draft was rejected
    probability: float = 1.0  # of this outcome, where several are possible


class Request:
    """What is known about one request."""

    __slots__ = ("at_risk", "difficulty", "group", "max_width", "rejections")

    def __init__(self, max_width: int) -> None:
        self.max_width = max_width
        self.rejections = 0.0
        self.at_risk = 0.0  # rejections that an average request would have had
        self.difficulty = 1.0
        self.group = (0, max_width)  # (class of difficulty, max_width): same expectations

    def learn(self, rejections: float, at_risk: float, keep: float) -> None:
        """Add a step; `keep` is what remains of the evidence before it."""
        self.rejections = keep * self.rejections + rejections
        self.at_risk = keep * self.at_risk + at_risk
        self.difficulty = (DIFFICULTY_PRIOR + self.rejections) / (DIFFICULTY_PRIOR + self.at_risk)
        self.group = (bisect(BOUNDS, self.difficulty) - WIDEST_CLASS, self.max_width)


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
        self._keep = 0.5 ** (1 / half_life)
        self._requests: dict[Hashable, Request] = {}
        # Both by position 1 .. block_size - 1, as means over the batch: evidence counts in steps.
        self._rejections = [0.0] * block_size
        self._at_risk = [0.0] * block_size
        self._update_curve()

    def limit(self, key: Hashable, max_width: int) -> None:
        """Commit at most this many tokens of a request in a step; 1 is no speculation for it."""
        self._requests[key] = Request(max(1, min(max_width, self._block_size)))

    def forget(self, key: Hashable) -> None:
        """Drop a finished request; one that was never seen is fine."""
        self._requests.pop(key, None)

    def groups(self, keys: Sequence[Hashable]) -> Groups:
        """Group requests by expected commits; new ones are added as average."""
        known = self._requests
        for key in keys:
            if key not in known:
                known[key] = Request(self._block_size)
        return Counter([known[key].group for key in keys])

    def expected_commit(self, groups: Groups, width: int) -> float:
        """Expected tokens that all these requests together commit in a step of this width."""
        return sum(
            count * self._commits(difficulty)[min(width, max_width)]
            for (difficulty, max_width), count in groups.items()
        )

    def most_commit(self, groups: Groups, known: int, width: int) -> float:
        """What they would commit if every draft past those of width `known` were accepted."""
        total = 0.0
        for (difficulty, max_width), count in groups.items():
            row, from_width = self._commits(difficulty), min(known, max_width)
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
        self.observe_outcomes(
            keys,
            [
                [verify_outcome(accept_len, min(width, self.max_width(key)) - 1)]
                for key, accept_len in zip(keys, accept_lens, strict=True)
            ],
        )

    def observe_outcomes(
        self, keys: Sequence[Hashable], outcomes: Sequence[Sequence[Outcome]]
    ) -> None:
        """Learn from the possible outcomes of a step, whose probabilities add up to 1.

        Args:
            keys: as in `observe`.
            outcomes: of each request.
        """
        rejections, at_risk = [0.0] * (self._block_size + 1), [0.0] * (self._block_size + 1)
        showing, difficulties = 0, 0.0
        for key, possible in zip(keys, outcomes, strict=True):
            request = self._requests.get(key)
            difficulty = 1.0 if request is None else request.difficulty
            rejected, risk = 0.0, 0.0
            for one in possible:
                at_risk[one.last_seen] += difficulty * one.probability
                rejections[one.last_seen] += one.rejected * one.probability
                rejected += one.rejected * one.probability
                risk += self._risk_up_to[one.last_seen] * one.probability
            if request is not None:
                request.learn(rejected, risk, self._keep)
            if any(one.last_seen > 0 for one in possible):
                showing += 1
                difficulties += difficulty
        self._age(0.5 ** (sqrt(len(keys)) / self._half_life))
        if showing:
            mean = (difficulties + AVERAGE_REQUESTS) / (showing + AVERAGE_REQUESTS)
            self._add([n / showing for n in rejections], [n / showing / mean for n in at_risk])
        self._update_curve()

    def max_width(self, key: Hashable) -> int:
        """Most tokens that a request may commit in a step."""
        request = self._requests.get(key)
        return self._block_size if request is None else request.max_width

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
        self._rows: dict[int, list[float]] = {}

    def _commits(self, difficulty_class: int) -> list[float]:
        """Expected committed tokens by width 0 .. block_size for one class of difficulty."""
        row = self._rows.get(difficulty_class)
        if row is None:
            difficulty = 2 ** (difficulty_class / STEPS_PER_OCTAVE)
            rejections = [min(1.0, difficulty * rejection) for rejection in self._curve[1:]]
            row = expected_commits(rejections, self._block_size)
            self._rows[difficulty_class] = row
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
    committed, survival = [0.0, 1.0], 1.0
    for width, rejection in enumerate(rejections, 2):
        survival *= 1 - rejection
        committed.append(committed[-1] + (survival if width <= limit else 0.0))
    return committed
