"""How far a tool is: one line that rewrites itself on a terminal, a line now and then in a log."""

import sys
from collections.abc import Iterable
from typing import Any, TextIO

from tqdm import tqdm

LOG_S = 30.0  # seconds between two lines in a log file
LOG_LINE = "{desc}{n_fmt} of {total_fmt}{unit}, {elapsed} elapsed, {remaining} left{postfix}"


class _LogLines:
    """A text file in which every state of a bar is a line, without carriage returns."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> None:
        """Write one state; empty ones, with which tqdm clears its line, are left out."""
        line = text.strip()
        if line:
            self._file.write(line + "\n")

    def flush(self) -> None:
        """Flush the file."""
        self._file.flush()


def progress(
    items: Iterable[Any] | None = None, *, unit: str, total: int | None = None, **more: Any
) -> Any:
    """A `tqdm` bar on standard error that also reads well in a log file.

    Args:
        items: what to go through; None: the caller updates the bar.
        unit: what is counted, in the plural.
        total: how many there are, if `items` does not say.
        more: other arguments of `tqdm`.
    """
    if not sys.stderr.isatty():
        more |= {"file": _LogLines(sys.stderr), "bar_format": LOG_LINE}
        more |= {"mininterval": LOG_S, "maxinterval": LOG_S}
    return tqdm(items, total=total, unit=f" {unit}", dynamic_ncols=True, **more)
