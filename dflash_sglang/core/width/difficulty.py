"""How hard the drafts of each running request are, a row of arrays for each.

A server decodes hundreds of requests in a step of a few milliseconds: numpy learns from all of them
in the time in which Python would learn from ten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.intp]
Flags = NDArray[np.bool_]

DIFFICULTY_PRIOR = 8.0  # K: rejections after which a request outweighs the average one
STEPS_PER_OCTAVE = 3  # difficulties are rounded to 2 ** (n / 3), so that requests share a table row
WIDEST_CLASS = 3 * STEPS_PER_OCTAVE  # difficulties between 1/8 and 8
BOUNDS = 2 ** ((np.arange(-WIDEST_CLASS, WIDEST_CLASS) + 0.5) / STEPS_PER_OCTAVE)

UNKNOWN = 0  # row of all requests that are not known: average, and never updated
FIRST_ROWS = 16

# How many requests share (class of difficulty, max_width), and so their expected commits.
Groups = dict[tuple[int, int], int]


class Difficulties:
    """Difficulty and widest width of every known request."""

    def __init__(self, block_size: int, keep: float) -> None:
        """Nothing is known.

        Args:
            block_size: tokens of a block, the anchor counted.
            keep: what remains of a request's evidence after a step of its own.
        """
        self._block_size = block_size
        self._keep = keep
        self._row_of: dict[Hashable, int] = {}
        self._free = list(range(1, FIRST_ROWS))
        self._rejections = np.zeros(FIRST_ROWS)
        self._at_risk = np.zeros(FIRST_ROWS)  # rejections that an average request would have had
        self._difficulty = np.ones(FIRST_ROWS)
        self._max_width = np.full(FIRST_ROWS, block_size)
        self._keys: tuple[Hashable, ...] | None = None  # whose rows were asked for last
        self._rows: Integers = np.empty(0, dtype=np.intp)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._row_of

    def __len__(self) -> int:
        return len(self._row_of)

    def put(self, key: Hashable, max_width: int) -> None:
        """An average request of which at most this many tokens are committed in a step."""
        row = self._row_of.get(key)
        if row is None:
            row = self._row_of[key] = self._new_row()
        self._reset(row)
        self._max_width[row] = max(1, min(max_width, self._block_size))
        self._keys = None

    def forget(self, key: Hashable) -> None:
        """Drop a request; one that is not known is fine."""
        row = self._row_of.pop(key, None)
        if row is not None:
            self._free.append(row)
            self._keys = None

    def rows(self, keys: Sequence[Hashable]) -> Integers:
        """Where these requests are, [n]."""
        keys = tuple(keys)
        if keys != self._keys:
            self._rows = np.array([self._row_of.get(key, UNKNOWN) for key in keys], dtype=np.intp)
            self._keys = keys
        return self._rows

    def known_rows(self, keys: Sequence[Hashable]) -> Integers:
        """Likewise; those that are not known become so."""
        rows = self.rows(keys)
        if not rows.all():
            for key in keys:
                if key not in self._row_of:
                    self.put(key, self._block_size)
            rows = self.rows(keys)
        return rows

    def max_widths(self, rows: Integers) -> Integers:
        """Most tokens that each commits in a step, [n]."""
        return self._max_width[rows]

    def of(self, rows: Integers) -> Floats:
        """The difficulty of each, [n]; 1 is average."""
        return self._difficulty[rows]

    def groups(self, keys: Sequence[Hashable]) -> Groups:
        """Group requests by what is expected of them; new ones are added as average."""
        rows, widths = self.known_rows(keys), self._block_size + 1
        classes = BOUNDS.searchsorted(self._difficulty[rows], side="right")
        counts = Counter((classes * widths + self._max_width[rows]).tolist())
        return {(code // widths - WIDEST_CLASS, code % widths): n for code, n in counts.items()}

    def learn(
        self, rows: Integers | int, rejections: Floats | Flags | float, at_risk: Floats | float
    ) -> None:
        """Add a step.

        Args:
            rows: of its requests, [n]; or of one, and the following are numbers.
            rejections: drafts rejected of each, [n].
            at_risk: rejections that an average request would have had in its place, [n].
        """
        rejections = self._keep * self._rejections[rows] + rejections
        at_risk = self._keep * self._at_risk[rows] + at_risk
        self._rejections[rows] = rejections
        self._at_risk[rows] = at_risk
        self._difficulty[rows] = (DIFFICULTY_PRIOR + rejections) / (DIFFICULTY_PRIOR + at_risk)
        self._reset(UNKNOWN)

    def _reset(self, row: int) -> None:
        self._rejections[row] = self._at_risk[row] = 0.0
        self._difficulty[row] = 1.0

    def _new_row(self) -> int:
        if not self._free:
            size = len(self._max_width)
            self._free = list(range(size, 2 * size))
            self._rejections = np.resize(self._rejections, 2 * size)
            self._at_risk = np.resize(self._at_risk, 2 * size)
            self._difficulty = np.resize(self._difficulty, 2 * size)
            self._max_width = np.resize(self._max_width, 2 * size)
        return self._free.pop()
