"""A simulated policy that narrows a verify by the drafter's probabilities of its drafts.

The server does not do this: reading the probabilities would make the host wait between draft and
verify. The simulator prices what it would gain.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from math import inf

from bench.width.confidence import ConfidenceModel
from dflash_sglang.core.width import CostTable, ObservedStep, WidthPolicy, WidthSettings
from dflash_sglang.core.width.acceptance_model import (
    Groups,
    Outcome,
    expected_commits,
    verify_outcome,
)

# Reading the probabilities costs time as well. Where a narrower verify gains less than this share
# of a step's commits, they are read only once in so many steps, after the first ones.
LEAST_GAIN, READ_EVERY, FIRST_READS = 0.03, 16, 64

Rows = Sequence[Sequence[float]]  # of each request of a batch, one value a draft


class NarrowingPolicy(WidthPolicy):
    """Chooses how many tokens to draft, and then how many of them to verify.

    A second of verifying must commit what a second commits on average, `rate`; so the verified
    width is that of the largest

        sum over requests of E[committed tokens | width, probabilities] - rate * seconds to verify

    and what this gains over verifying everything, in tokens, counts for the drafted width from then
    on, if it is enough to be worth reading the probabilities for.
    """

    def __init__(self, block_size: int, costs: CostTable, settings: WidthSettings) -> None:
        super().__init__(block_size, costs, settings)
        self._block_size = block_size
        self._confidence = ConfidenceModel(settings.half_life)
        self._keep = 0.5 ** (1 / settings.half_life)
        # By (batch size, width): tokens a step, reads, and steps since the last one.
        self._gains: defaultdict[tuple[int, int], float] = defaultdict(float)
        self._reads: Counter[tuple[int, int]] = Counter()
        self._unread: Counter[tuple[int, int]] = Counter()
        self._limits: dict[Hashable, int] = {}
        self._expected: dict[int, float] = {}  # tokens of the next step, by width, without gains

    def limit(self, key: Hashable, max_width: int) -> None:
        """As `WidthPolicy.limit`."""
        super().limit(key, max_width)
        self._limits[key] = max_width

    def reads_confidences(self, batch_size: int, width: int) -> bool:
        """Whether the step that was just chosen reads the drafter's probabilities.

        Args:
            batch_size: requests of the step.
            width: what was chosen, above 1.
        """
        cell = (batch_size, width)
        self._unread[cell] += 1
        if (
            self._reads[cell] < FIRST_READS
            or self._unread[cell] >= READ_EVERY
            or self._worthwhile_gain(*cell) > 0
        ):
            self._unread[cell] = 0
            return True
        return False

    def narrow(self, keys: Sequence[Hashable], width: int, confidences: Rows) -> int:
        """How many of the drafted tokens to verify; all of them in a probe.

        Args:
            keys: the requests that `width` was chosen for.
            width: drafted tokens of each, the anchor counted.
            confidences: the drafter's probability of each draft, `width` - 1 of every request.

        Returns:
            One of `widths`, or `width`.
        """
        batch_size = len(keys)
        expected = [
            expected_commits(
                self._confidence.rejections(row), self._limits.get(key, self._block_size)
            )
            for key, row in zip(keys, confidences, strict=True)
        ]
        rate, whole = batch_size / self._seconds_per_commit, self._costs.seconds(batch_size, width)
        values = {
            verified: sum(row[verified] for row in expected)
            - rate * (whole - self._saved(batch_size, width, verified))
            for verified in self.widths
            if verified <= width
        }
        self._update_gains(batch_size, values)
        if width == self._probe_width:
            return width
        return max(values, key=values.__getitem__)

    def observe_narrowed(self, step: ObservedStep, verified: int, confidences: Rows) -> None:
        """Learn from a step of which `verified` tokens of each request were verified.

        Drafts that were not verified because they looked bad would, left out, make the rest look
        good: they count with the probability that they would have been rejected.
        """
        if step.seconds is not None:
            saved = self._saved(len(step.keys), step.width, verified)
            step = step._replace(seconds=step.seconds + saved)
            self._clock -= saved
        self._observe_time(step)
        outcomes = [
            list(self._outcomes(key, accept_len, verified, row))
            for key, accept_len, row in zip(step.keys, step.accept_lens, confidences, strict=True)
        ]
        self._confidence.observe([row[: verified - 1] for row in confidences], step.accept_lens)
        self._acceptance.observe_outcomes(step.keys, outcomes)

    def _outcomes(
        self, key: Hashable, accept_len: int, verified: int, confidences: Sequence[float]
    ) -> Iterator[Outcome]:
        """What a verify shows of a request, and what it would have shown further on."""
        limit = self._limits.get(key, self._block_size)
        shown = min(verified, limit) - 1
        seen = verify_outcome(accept_len, shown)
        if seen.rejected:
            yield seen
            return
        unshown = self._confidence.rejections(confidences[verified - 1 : limit - 1])
        reached = 1.0
        for position, rejection in enumerate(unshown, shown + 1):
            yield Outcome(position, rejected=True, probability=reached * rejection)
            reached *= 1 - rejection
        yield Outcome(shown + len(unshown), rejected=False, probability=reached)

    def _expected_commits(self, groups: Groups) -> dict[int, float]:
        self._expected = super()._expected_commits(groups)
        batch_size = groups.total()
        return {
            width: expected + self._worthwhile_gain(batch_size, width)
            for width, expected in self._expected.items()
        }

    def _worthwhile_gain(self, batch_size: int, width: int) -> float:
        gain = self._gains[batch_size, width]
        return gain if gain >= LEAST_GAIN * self._expected[width] else 0.0

    def _saved(self, batch_size: int, width: int, verified: int) -> float:
        """Seconds that verifying `verified` instead of `width` tokens saves."""
        verify = self._costs.verify_seconds
        return verify(batch_size, width) - verify(batch_size, verified)

    def _update_gains(self, batch_size: int, values: Mapping[int, float]) -> None:
        """What choosing among `values`, ascending widths, gains over the widest of them."""
        best = -inf
        for width, value in values.items():
            best = max(best, value)
            cell = (batch_size, width)
            self._reads[cell] += 1
            weight = max(1 - self._keep, 1 / self._reads[cell])
            self._gains[cell] += weight * (best - value - self._gains[cell])
