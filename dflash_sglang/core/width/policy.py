"""Choose the width that commits the most tokens per second."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from dflash_sglang.core.width.acceptance_model import AcceptanceModel
from dflash_sglang.core.width.cost_model import CostTable
from dflash_sglang.core.width.difficulty import Groups
from dflash_sglang.core.width.narrowing import Bound, BoundTables, Narrowing
from dflash_sglang.core.width.settings import WidthSettings

# From plain decoding: width 2 would show a single draft, and only the first of the block.
LEAST_PROBE = 4
# Steps between a change of width, or a burst of probes that lost, and the next probe, at least.
REST = 32
UNSET = 0  # no width


class ObservedStep(NamedTuple):
    """The outcome of a decode step."""

    keys: Sequence[Hashable]  # requests of the batch, each with its own key
    accept_lens: Sequence[int]  # accepted drafts of each, below `width`
    width: int  # tokens of each that were drafted and verified, the anchor counted
    seconds: float | None  # None if not measured
    forwards: int = 1  # above 1 only at width 1: so many single tokens of each in one step
    bound: Bound | None = None  # of a single request whose verify was narrowed, or could have been


class WidthPolicy:
    """One width for the whole batch, chosen before each step.

    The width is that of the largest

        sum over requests of E[committed tokens | width] / seconds(batch size, width),

    and it is left only for one that promises `hysteresis` more. Since the width is the same for
    all, no request starves: every step commits at least one token of each.

    Drafts that are not verified are not observed, so once in a while a step is wider than the best
    known width, a *probe*. Probes come in bursts: one that commits what its time would have
    committed at the best known width is repeated at once, so that drafts that have become good are
    used after a few steps. A burst that falls behind ends, and the next one waits until what was
    lost is no more than `explore_share` of the time served.

    A single request's verify may end earlier than its draft (`Narrowing`): the width is then that
    of the draft, and it counts with what narrowing gains at it.

    Steps may be observed late, as under overlapped scheduling, or never.
    """

    def __init__(
        self,
        block_size: int,
        costs: CostTable,
        settings: WidthSettings,
        largest_batch: Mapping[int, int] | None = None,
    ) -> None:
        """Start optimistic: the first steps draft.

        Args:
            block_size: tokens of a block, the anchor counted.
            costs: seconds of a step, at every width on offer.
            settings: the knobs.
            largest_batch: the largest batch size at which a width is on offer, of widths that are
                not on offer at any; 0 for one that never is. The widest always is.

        Raises:
            ConfigError: the settings do not fit the block size.
        """
        self.widths = settings.ladder(block_size)
        self._largest_batch = {} if largest_batch is None else largest_batch
        self._leave_at = 1 + settings.hysteresis
        self._explore_share = settings.explore_share
        self._costs = costs
        self._acceptance = AcceptanceModel(block_size, settings.half_life)
        self._narrowing = Narrowing(costs, settings) if costs.narrows else None
        self._width = UNSET  # the best known one
        self._seconds_per_commit = 0.0  # of a request, expected at that width
        self._clock = 0.0  # seconds served
        self._probe_at = 0.0  # on that clock
        self._probe_width = UNSET  # of the current burst
        self._lost = 0.0  # seconds this burst is behind; negative: ahead
        self._burst_over = False  # a late probe of it may still be observed

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
            keys: the requests of the batch, not empty; new ones are added.
        """
        if len(self.widths) == 1:
            return self.widths[0]
        batch_size, groups = len(keys), self._acceptance.groups(keys)
        offered = self.on_offer(batch_size)
        seconds = {width: self._costs.seconds(batch_size, width) for width in offered}
        commits = self._expected_commits(groups)
        rates = {width: commits[width] / seconds[width] for width in offered}
        self._settle(rates, seconds)
        rate = rates[self._width]
        self._seconds_per_commit = batch_size / rate
        probe = self._probe(groups, seconds, rate) if self._clock >= self._probe_at else UNSET
        return probe or self._width

    def on_offer(self, batch_size: int) -> list[int]:
        """Widths that a batch of this size can have, ascending."""
        largest = self._largest_batch
        return [width for width in self.widths if batch_size <= largest.get(width, batch_size)]

    def bound_tables(self, key: Hashable, width: int) -> BoundTables | None:
        """What the device decides by how many of a single request's tokens to verify.

        Args:
            key: the request that `width` was chosen for.
            width: of the draft.

        Returns:
            None where a verify cannot be narrowed.
        """
        if self._narrowing is None or width == 1:
            return None
        return self._narrowing.tables(
            width,
            self._acceptance.max_width(key),
            1 / self._seconds_per_commit,
            # A probe is there to see how all its drafts fare.
            free=width == self._probe_width,
        )

    def observe(self, step: ObservedStep) -> None:
        """Learn from a step; steps in the order in which they ran.

        Raises:
            KeyError: the cost table does not have the step's width.
        """
        self._observe_time(step)
        if self._narrowing is None or step.bound is None:
            self._acceptance.observe(step.keys, step.accept_lens, step.width)
            return
        (key,), (accept_len,) = step.keys, step.accept_lens
        limit = self._acceptance.max_width(key)
        outcomes = self._narrowing.observe(step.bound, accept_len, limit)
        self._acceptance.observe_outcomes(step.keys, [outcomes])

    def _expected_commits(self, groups: Groups) -> dict[int, float]:
        """Tokens that a step of these requests is expected to commit, by width."""
        commits = {width: self._acceptance.expected_commit(groups, width) for width in self.widths}
        if self._narrowing is not None and sum(groups.values()) == 1:
            for width in commits:
                commits[width] += self._narrowing.gain(width)
        return commits

    def _observe_time(self, step: ObservedStep) -> None:
        batch_size = len(step.keys)
        # Not the measured duration: an outlier is no evidence of a probe's cost.
        usual = self._costs.seconds(batch_size, step.width)
        saved = 0.0
        if step.bound is not None:
            saved = self._costs.saved_seconds(step.width, step.bound.verified)
        self._clock += usual * step.forwards - saved if step.seconds is None else step.seconds
        if step.seconds is not None:  # the costs are those of a whole verify
            self._costs.observe(batch_size, step.width, step.seconds / step.forwards + saved)
        if step.width == self._probe_width:
            commits = 1 + sum(step.accept_lens) / batch_size
            self._judge(usual - commits * self._seconds_per_commit, usual)

    def _settle(self, rates: Mapping[int, float], seconds: Mapping[int, float]) -> None:
        """Take the best width as the current one, if it is better by enough."""
        best = max(rates, key=rates.__getitem__)
        if self._width not in rates or rates[best] > self._leave_at * rates[self._width]:
            self._width = best
            self._probe_width = UNSET
            self._wait(0.0, seconds[best])

    def _probe(self, groups: Groups, seconds: Mapping[int, float], rate: float) -> int:
        """The next wider width that could be better, if all it newly shows were accepted."""
        if self._burst_over:
            self._burst_over, self._lost = False, 0.0
        for width in seconds:
            if width > self._width and width >= min(LEAST_PROBE, self.widths[-1]):
                most = self._acceptance.most_commit(groups, self._width, width)
                if most / seconds[width] > rate:
                    self._probe_width = width
                    # As if it had shown nothing good, until it is observed.
                    self._wait(seconds[width] - seconds[self._width], seconds[width])
                    return width
        return UNSET

    def _judge(self, loss: float, seconds: float) -> None:
        """Continue a burst of probes, or end it.

        Args:
            loss: seconds that the probe lost against the current width.
            seconds: what it took.
        """
        self._lost = max(self._lost + loss, -seconds)  # one good probe pays for one bad one
        self._burst_over = self._burst_over or self._lost > 0
        if self._burst_over:
            self._wait(self._lost, seconds)
        else:
            self._probe_at = self._clock

    def _wait(self, loss: float, seconds: float) -> None:
        """Put the next probe off until `loss` is a small enough share of the time served."""
        self._probe_at = self._clock + max(loss / self._explore_share, REST * seconds)
