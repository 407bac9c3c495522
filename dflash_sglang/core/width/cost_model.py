"""Seconds of a decode step by batch size and verify width."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

WINDOW = 31  # served steps in the running median: up to 15 of them may be outliers
LEAST = 3  # a median of fewer would be the outlier itself
# A cell that served this many steps weighs as much as its width at other batch sizes.
CELL_PRIOR = 4
# Measurements of a width are dropped after so many steps at others: it may have been slow for a
# reason that has gone, and would otherwise never be tried again. With exponential back-off up to
# the second number, so that a width that stays slow costs less and less.
STALE, MOST_STALE = 1000, 1000 * 2**4


class CostTable:
    """Measured forwards of verifier and drafter, corrected by the time of served steps.

    At start, bare forwards are measured. A served step takes longer: scheduling, sampling,
    launches. Its time beyond the forwards, its *excess*, is tracked as a running median for
    each drafted width, and within it for each measured batch size. A width that was never served
    has none, so it looks fast and is tried for a few steps; were it assumed to be as slow as the
    others, a width that is slow for a reason of its own would never be left. Nor has one that was
    not served for long.
    """

    def __init__(
        self,
        draft: Mapping[tuple[int, int], float],
        verify: Mapping[tuple[int, int], float],
    ) -> None:
        """Take what was measured at start.

        Args:
            draft: seconds of a draft forward by (batch size, width), for every width above 1
                that will be used.
            verify: seconds of a verify forward by (batch size, width), for the same, and
                width 1 if it will be used.

        Raises:
            ValueError: nothing was measured, or not every width at each batch size.
        """
        self._batches = sorted({batch for batch, _ in verify})
        widths = sorted({width for _, width in verify})
        expected = {(batch, width) for batch in self._batches for width in widths}
        drafted = {(batch, width) for batch, width in expected if width > 1}
        if not expected or set(verify) != expected or set(draft) != drafted:
            raise ValueError(
                f"verify was measured at {sorted(verify)}, draft at {sorted(draft)}: measure every "
                "width at each batch size."
            )
        self._draft = self._columns(draft)
        self._verify = self._columns(verify)
        self._widths = {width: RunningMedian() for width in widths}
        self._cells: dict[tuple[int, int], RunningMedian] = {}
        self._measured: dict[tuple[int, int], float] = {}  # interpolated
        self._steps = 0  # observed
        self._served: dict[int, int] = {}  # by width, the step of its last
        self._stale = dict.fromkeys(widths, STALE)  # steps until it is dropped

    def _columns(self, seconds: Mapping[tuple[int, int], float]) -> dict[int, list[float]]:
        """By width, along the batch sizes; rising with both."""
        columns: dict[int, list[float]] = {}
        narrower = [0.0] * len(self._batches)
        for width in sorted({width for _, width in seconds}):
            column = [seconds[batch, width] for batch in self._batches]
            narrower = rising([max(pair) for pair in zip(column, narrower, strict=True)])
            columns[width] = narrower
        return columns

    def __str__(self) -> str:
        """The measured milliseconds of a step by batch size, the widths in ascending order."""
        rows = [
            f"batch {batch}: "
            + "/".join(f"{1000 * self.measured(batch, width):.1f}" for width in self._verify)
            for batch in self._batches
        ]
        return ", ".join(rows) + " ms"

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
        key = (batch_size, width)
        if key not in self._measured:
            draft = self.draft_seconds(batch_size, width)
            self._measured[key] = draft + self.verify_seconds(batch_size, width)
        return self._measured[key]

    def draft_seconds(self, batch_size: int, width: int) -> float:
        """Seconds of the draft forward, as measured at start; 0 at width 1."""
        if width == 1:
            return 0.0
        return interpolate(self._batches, self._draft[width], batch_size)

    def verify_seconds(self, batch_size: int, width: int) -> float:
        """Seconds of the verify forward, as measured at start."""
        return interpolate(self._batches, self._verify[width], batch_size)

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
