"""Choose the width that commits the most tokens per second."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from math import inf
from typing import NamedTuple

from dflash_sglang.core.width.acceptance_model import AcceptanceModel, Groups
from dflash_sglang.core.width.confidence import Confidence, expected_commits
from dflash_sglang.core.width.cost_model import CostTable
from dflash_sglang.core.width.settings import WidthSettings

# From plain decoding: width 2 would show a single draft, and only the first of the block.
LEAST_PROBE = 4
# Steps between a change of width, or a run of probes that lost, and the next probe, at least.
REST = 32
UNSET = 0  # no width
# Asking how sure the drafter is costs a wait of the host, a pass over the logits and a decision.
# Where verifying less gains less than this share of what a step commits, it is asked again only
# once in so many steps, after the first ones.
LEAST_GAIN, ASK_EVERY, FIRST_ASKS = 0.03, 16, 64

Rows = Sequence[Sequence[float]]  # of each request of a batch, one value a draft


class ObservedStep(NamedTuple):
    """What a decode step turned out to do."""

    keys: Sequence[Hashable]  # requests of the batch, each with its own key
    accept_lens: Sequence[int]  # drafts accepted of each, below what was verified; 0 at width 1
    width: int  # tokens drafted of each, the anchor counted
    seconds: float | None  # None: nobody knows
    passes: int = 1  # above 1 only at width 1: so many plain tokens of each in this one step
    verified: int | None = None  # tokens verified of each; None: all that were drafted
    confidences: Rows | None = None  # the drafter's probability of each draft, if it was asked


class WidthPolicy:
    """One width for the whole batch, chosen before each step.

    The width is that of the largest

        sum over requests of E[committed tokens | width] / seconds(batch size, width),

    and it is left only for one that promises `hysteresis` more. Since the width is the same for
    all, no request starves: every step commits at least one token of each.

    So many tokens are drafted. If the drafter then says how sure it is of each, fewer are verified
    where that pays (`narrow`). A second of verifying must commit what a second commits on average,
    `rate`; so the narrower width is that of the largest

        sum over requests of E[committed tokens | width, confidences] - rate * seconds of its verify

    and what this gains over verifying everything, in tokens, counts for the drafted width from then
    on, if it is enough to be worth asking for (`asks`).

    Drafts that are not verified are not observed, so once in a while a step is wider than the best
    known width, a *probe*. Probes come in runs: one that commits what its time would have
    committed at the best known width is repeated at once, so that drafts that have become good are
    believed after a few steps. A run that falls behind ends, and the next one waits until what
    was lost is no more than `explore_share` of the time served.

    Steps may be observed late, as under overlapped scheduling, or never.
    """

    def __init__(self, block_size: int, costs: CostTable, settings: WidthSettings) -> None:
        """Start optimistic: the first steps draft.

        Args:
            block_size: tokens of a block, the anchor counted.
            costs: what a step takes, at every width of `settings.ladder(block_size)`.
            settings: the knobs.

        Raises:
            ConfigError: the settings do not fit the block size.
        """
        self.widths = settings.ladder(block_size)
        self._leave_at = 1 + settings.hysteresis
        self._explore_share = settings.explore_share
        self._costs = costs
        self._acceptance = AcceptanceModel(block_size, settings.half_life)
        self._confidence = Confidence(settings.half_life)
        self._keep = 0.5 ** (1 / settings.half_life)
        # By (batch size, width): tokens a step, of how many answers, and steps since the last one.
        self._gains: defaultdict[tuple[int, int], float] = defaultdict(float)
        self._answers: Counter[tuple[int, int]] = Counter()
        self._unasked: Counter[tuple[int, int]] = Counter()
        self._expected: dict[int, float] = {}  # tokens of the next step, by width, without gains
        self._width = UNSET  # the best known one
        self._seconds_per_commit = 0.0  # of a request, expected at that width
        self._clock = 0.0  # seconds served
        self._probe_at = 0.0  # on that clock
        self._probe_width = UNSET  # of the current run of probes
        self._lost = 0.0  # seconds this run is behind; negative: ahead
        self._run_over = False  # a late probe of it may still be observed

    def limit(self, key: Hashable, max_width: int) -> None:
        """Commit at most `max_width` tokens of a request in a step; 1: it does not speculate.

        Call it before the request's first step. The batch is still verified at one width; the
        request counts with what it can commit.
        """
        self._acceptance.limit(key, max_width)

    def forget(self, key: Hashable) -> None:
        """Drop a finished request; its last steps may still be observed afterwards."""
        self._acceptance.forget(key)

    def choose(self, keys: Sequence[Hashable]) -> int:
        """Width of the next step.

        Args:
            keys: the requests of the batch, not empty; new ones are taken in.
        """
        if len(self.widths) == 1:
            return self.widths[0]
        batch_size, groups = len(keys), self._acceptance.groups(keys)
        seconds = {width: self._costs.seconds(batch_size, width) for width in self.widths}
        self._expected = {
            width: self._acceptance.expected_commit(groups, width) for width in self.widths
        }
        rates = {
            width: (expected + self._worthwhile_gain(batch_size, width)) / seconds[width]
            for width, expected in self._expected.items()
        }
        self._settle(rates, seconds)
        rate = rates[self._width]
        self._seconds_per_commit = batch_size / rate
        probe = self._probe(groups, seconds, rate) if self._clock >= self._probe_at else UNSET
        return probe or self._width

    def asks(self, batch_size: int, width: int) -> bool:
        """Whether to ask the drafter how sure it is, in the step that `choose` was last asked for.

        Args:
            batch_size: requests of the step.
            width: what was chosen, above 1.
        """
        cell = (batch_size, width)
        self._unasked[cell] += 1
        if (
            self._answers[cell] < FIRST_ASKS
            or self._unasked[cell] >= ASK_EVERY
            or self._worthwhile_gain(*cell) > 0
        ):
            self._unasked[cell] = 0
            return True
        return False

    def _worthwhile_gain(self, batch_size: int, width: int) -> float:
        gain = self._gains[batch_size, width]
        return gain if gain >= LEAST_GAIN * self._expected[width] else 0.0

    def narrow(self, keys: Sequence[Hashable], width: int, confidences: Rows) -> int:
        """How many of the drafted tokens to verify; all of them in a probe.

        Args:
            keys: the requests that `width` was chosen for.
            width: tokens drafted of each, the anchor counted.
            confidences: the drafter's probability of each draft, `width` - 1 of every request.

        Returns:
            One of `widths`, or `width`.
        """
        batch_size = len(keys)
        expected = [
            expected_commits(self._confidence.rejections(row), self._acceptance.max_width(key))
            for key, row in zip(keys, confidences, strict=True)
        ]
        rate = batch_size / self._seconds_per_commit
        values = {
            verified: sum(row[verified] for row in expected)
            - rate * self._costs.seconds(batch_size, width, verified)
            for verified in self.widths
            if verified <= width
        }
        self._update_gains(batch_size, values)
        if width == self._probe_width:
            return width
        return max(values, key=values.__getitem__)

    def _update_gains(self, batch_size: int, values: Mapping[int, float]) -> None:
        """What choosing among `values`, ascending widths, gains over the widest of them."""
        best = -inf
        for width, value in values.items():
            best = max(best, value)
            cell = (batch_size, width)
            self._answers[cell] += 1
            weight = max(1 - self._keep, 1 / self._answers[cell])
            self._gains[cell] += weight * (best - value - self._gains[cell])

    def observe(self, step: ObservedStep) -> None:
        """Learn from a step; steps in the order in which they ran.

        Raises:
            KeyError: the cost table does not have the step's width.
        """
        batch_size = len(step.keys)
        # Not the measured duration: an outlier says nothing about what a probe costs.
        verified = step.width if step.verified is None else step.verified
        usual = self._costs.seconds(batch_size, step.width, verified)
        self._clock += usual * step.passes if step.seconds is None else step.seconds
        if step.seconds is not None:
            self._costs.observe(batch_size, step.width, step.seconds / step.passes, verified)
        if step.width == self._probe_width:
            commits = 1 + sum(step.accept_lens) / batch_size
            self._judge(usual - commits * self._seconds_per_commit, usual)
        unshown = None
        if step.confidences is not None:
            unshown = [self._confidence.rejections(row[verified - 1 :]) for row in step.confidences]
            shown = [row[: verified - 1] for row in step.confidences]
            self._confidence.observe(shown, step.accept_lens)
        self._acceptance.observe(step.keys, step.accept_lens, verified, unshown)

    def _settle(self, rates: Mapping[int, float], seconds: Mapping[int, float]) -> None:
        """Take the best width as the current one, if it is better by enough."""
        best = max(rates, key=rates.__getitem__)
        if self._width == UNSET or rates[best] > self._leave_at * rates[self._width]:
            self._width = best
            self._probe_width = UNSET
            self._wait(0.0, seconds[best])

    def _probe(self, groups: Groups, seconds: Mapping[int, float], rate: float) -> int:
        """The next wider width that could be better, if all it newly shows were accepted."""
        if self._run_over:
            self._run_over, self._lost = False, 0.0
        for width in self.widths:
            if width > self._width and width >= min(LEAST_PROBE, self.widths[-1]):
                most = self._acceptance.most_commit(groups, self._width, width)
                if most / seconds[width] > rate:
                    self._probe_width = width
                    # As if it had shown nothing good, until it is observed.
                    self._wait(seconds[width] - seconds[self._width], seconds[width])
                    return width
        return UNSET

    def _judge(self, loss: float, seconds: float) -> None:
        """Go on with a run of probes, or end it.

        Args:
            loss: seconds that the probe lost against the current width.
            seconds: what it took.
        """
        self._lost = max(self._lost + loss, -seconds)  # one good probe pays for one bad one
        self._run_over = self._run_over or self._lost > 0
        if self._run_over:
            self._wait(self._lost, seconds)
        else:
            self._probe_at = self._clock

    def _wait(self, loss: float, seconds: float) -> None:
        """Put the next probe off until `loss` is a small enough share of the time served."""
        self._probe_at = self._clock + max(loss / self._explore_share, REST * seconds)
