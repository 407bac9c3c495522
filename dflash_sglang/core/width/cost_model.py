"""Seconds of a decode step by batch size and verify width."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from statistics import median
from typing import NamedTuple

WINDOW = 31  # served steps in the running median: up to 15 of them may be outliers
LEAST = 3  # a median of fewer would be the outlier itself
# A cell that served this many steps weighs as much as its width at other batch sizes.
CELL_PRIOR = 4
# Measurements of a width are dropped after so many steps at others: it may have been slow for a
# reason that has gone, and would otherwise never be tried again. With exponential back-off up to
# the second number, so that a width that stays slow costs less and less.
STALE, MOST_STALE = 1000, 1000 * 2**4

Cells = Mapping[tuple[int, int], float]  # seconds by (batch size, width)


class Column(NamedTuple):
    """What was measured of one width, rising."""

    batches: list[int]
    seconds: list[float]

    def at(self, batch_size: int) -> float:
        """Interpolated."""
        return interpolate(self.batches, self.seconds, batch_size)


class CostTable:
    """Measured forwards of verifier and drafter, corrected by the time of served steps.

    At start, bare forwards are measured. A served step takes longer: scheduling, sampling,
    launches. Its time beyond the forwards, its *excess*, is tracked as a running median for
    each drafted width, and within it for each measured batch size. A width that was never served
    has none, so it looks fast and is tried for a few steps; were it assumed to be as slow as the
    others, a width that is slow for a reason of its own would never be left. Nor has one that was
    not served for long.

    Attention reads the context, so a forward is slower behind a longer one: `at` sets the mean
    context of the requests that run, and all seconds are those at that context.
    """

    def __init__(
        self,
        draft: Cells,
        verify: Cells,
        *,
        draft_per_token: Cells | None = None,
        verify_per_token: Cells | None = None,
        context: int = 0,
        bounded: Cells | None = None,
    ) -> None:
        """Take what was measured at start.

        Args:
            draft: seconds of a draft forward, at the cells of `verify` with a width above 1.
            verify: seconds of a verify forward, for every width that will be used, at the batch
                sizes at which it will be.
            draft_per_token: seconds that a token more of context adds to a draft forward, at some
                cells of `draft`, of every width; None for nothing.
            verify_per_token: likewise, of a verify.
            context: tokens before the block at which `draft` and `verify` were measured.
            bounded: seconds of a single request's verify by (tokens routed to experts, width), for
                the widths that can be narrowed, 1 and the width among the tokens; None for none.

        Raises:
            ValueError: nothing was measured, a width lacks the smallest batch size, or the tables
                have different cells.
        """
        self._batches = sorted({batch for batch, _ in verify})
        widths = sorted({width for _, width in verify})
        smallest = {(self._batches[0], width) for width in widths} if verify else {(1, 1)}
        if (
            not smallest <= set(verify)
            or set(draft) != {cell for cell in verify if cell[1] > 1}
            or not within(draft_per_token, smallest & set(draft), draft)
            or not within(verify_per_token, smallest, verify)
        ):
            raise ValueError(
                f"verify was measured at {sorted(verify)}, draft at {sorted(draft)}: measure every "
                "width at the smallest batch size, and all at the same cells."
            )
        self._draft = columns(draft)
        self._verify = columns(verify)
        self._draft_per_token = columns(draft_per_token or dict.fromkeys(draft, 0.0))
        self._verify_per_token = columns(verify_per_token or dict.fromkeys(verify, 0.0))
        # By width and tokens; made once, because every step asks for all of them.
        self._saved = {
            width: [column.at(width) - column.at(tokens) for tokens in range(width + 1)]
            for width, column in columns(bounded or {}).items()
        }
        self._context = context
        self._beyond = 0.0  # tokens of mean context beyond that, of the requests that run
        self._widths = {width: RunningMedian() for width in widths}
        self._cells: dict[tuple[int, int], RunningMedian] = {}
        # Interpolated: seconds at `context`, and for each token more of it.
        self._measured: dict[tuple[int, int], tuple[float, float]] = {}
        self._steps = 0  # observed
        self._served: dict[int, int] = {}  # by width, the step of its last
        self._stale = dict.fromkeys(widths, STALE)  # steps until it is dropped

    def __str__(self) -> str:
        """Measured milliseconds of a step by batch size, of the widths in ascending order.

        Behind a "+" what 1,000 tokens more of context add to the widest.
        """
        rows = []
        for batch in self._batches:
            widths = [width for width, column in self._verify.items() if batch in column.batches]
            cells = [self._cost(batch, width) for width in widths]
            times = "/".join(f"{1e3 * seconds:.1f}" for seconds, _ in cells)
            rows.append(f"batch {batch}: {times} + {1e6 * cells[-1][1]:.2f}")
        return ", ".join(rows) + " ms"

    def at(self, context: float) -> None:
        """The requests that run have this many tokens each before the block, on average."""
        self._beyond = max(0.0, context - self._context)

    def seconds(self, batch_size: int, width: int) -> float:
        """Expected seconds of a step; width 1 is plain decoding and drafts nothing.

        Args:
            batch_size: requests.
            width: tokens of each that are drafted and verified, the anchor counted.

        Raises:
            KeyError: a width was not measured.
        """
        # From other batch sizes: never that a step is faster than its forwards.
        excess = max(0.0, self._widths[width].value)
        cell = self._cells.get((self._cell(batch_size), width))
        if cell is not None:
            excess += (cell.value - excess) * cell.count / (cell.count + CELL_PRIOR)
        return self.measured(batch_size, width) + excess

    def measured(self, batch_size: int, width: int) -> float:
        """Seconds of the step's forwards alone, as measured at start; arguments as in `seconds`."""
        seconds, per_token = self._cost(batch_size, width)
        return seconds + per_token * self._beyond

    def draft_seconds(self, batch_size: int, width: int) -> float:
        """Seconds of the draft forward, as measured at start; 0 at width 1."""
        if width == 1:
            return 0.0
        per_token = self._draft_per_token[width].at(batch_size)
        return self._draft[width].at(batch_size) + per_token * self._beyond

    def verify_seconds(self, batch_size: int, width: int) -> float:
        """Seconds of the verify forward, as measured at start."""
        per_token = self._verify_per_token[width].at(batch_size)
        return self._verify[width].at(batch_size) + per_token * self._beyond

    @property
    def narrows(self) -> bool:
        """Whether bounded verifies were measured."""
        return bool(self._saved)

    def saved_seconds(self, width: int, verified: int) -> float:
        """What routing only `verified` of a single request's `width` tokens to experts saves.

        0 for a width that cannot be narrowed.
        """
        saved = self._saved.get(width)
        return 0.0 if saved is None else saved[verified]

    def _cost(self, batch_size: int, width: int) -> tuple[float, float]:
        """Seconds of the step's forwards at the shortest context, and for each token more of it."""
        key = (batch_size, width)
        if key not in self._measured:
            seconds = self._verify[width].at(batch_size)
            per_token = self._verify_per_token[width].at(batch_size)
            if width > 1:
                seconds += self._draft[width].at(batch_size)
                per_token += self._draft_per_token[width].at(batch_size)
            self._measured[key] = seconds, per_token
        return self._measured[key]

    def observe(self, batch_size: int, width: int, seconds: float) -> None:
        """Learn from a served step that did nothing but decode; arguments as in `seconds`."""
        excess = seconds - self.measured(batch_size, width)
        self._steps += 1
        self._served[width] = self._steps
        self._drop_stale()
        self._widths[width].add(excess)
        self._cells.setdefault((self._cell(batch_size), width), RunningMedian()).add(excess)

    def _drop_stale(self) -> None:
        for width, last in list(self._served.items()):
            if self._steps - last >= self._stale[width]:
                self._stale[width] = min(2 * self._stale[width], MOST_STALE)
                del self._served[width]
                self._widths[width] = RunningMedian()
                for cell in [key for key in self._cells if key[1] == width]:
                    del self._cells[cell]

    def _cell(self, batch_size: int) -> int:
        """Index of the largest measured batch size that is not above this one."""
        return max(0, bisect_right(self._batches, batch_size) - 1)


class RunningMedian:
    """Median of the latest values; 0 before there are enough."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self.value = 0.0

    @property
    def count(self) -> int:
        """Values that the median rests on."""
        return len(self._recent) if len(self._recent) >= LEAST else 0

    def add(self, value: float) -> None:
        """Add one; a single outlier moves the median by one rank at most."""
        self._recent.append(value)
        if len(self._recent) >= LEAST:
            self.value = median(self._recent)


def within(cells: Cells | None, least: Collection[tuple[int, int]], most: Cells) -> bool:
    """Whether a table that may be left out has these cells, and no others than those."""
    return not cells or set(least) <= set(cells) <= set(most)


def columns(cells: Cells) -> dict[int, Column]:
    """By width, along the batch sizes at which it was measured; rising with both, from 0 on."""
    narrower: dict[int, float] = {}  # at least so much at this batch size
    by_width = {}
    for width in sorted({width for _, width in cells}):
        batches = sorted(batch for batch, other in cells if other == width)
        seconds = rising([max(cells[batch, width], narrower.get(batch, 0.0)) for batch in batches])
        by_width[width] = Column(batches, seconds)
        narrower |= zip(batches, seconds, strict=True)
    return by_width


def rising(values: Sequence[float]) -> list[float]:
    """The running maximum: more work is never faster; a measurement that is, is noise."""
    return [max(values[: i + 1]) for i in range(len(values))]


def interpolate(xs: Sequence[int], ys: Sequence[float], x: float) -> float:
    """Piecewise linear through ascending points: constant before them, linear beyond."""
    if x <= xs[0] or len(xs) == 1:
        return ys[0]
    right = min(bisect_right(xs, x), len(xs) - 1)
    left = right - 1
    slope = (ys[right] - ys[left]) / (xs[right] - xs[left])
    return ys[left] + slope * (x - xs[left])
