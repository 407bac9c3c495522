"""A progress bar with a count and the time left, which is also readable in a log file."""

import sys
from collections.abc import Iterable
from typing import Any, TextIO

from tqdm import tqdm

from launch.progress import LOG_INTERVAL_S

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
    """A `tqdm` bar on standard error; in a log file a line now and then instead.

    Args:
        items: what to go through; None: the caller updates the bar.
        unit: what is counted, in the plural.
        total: how many there are, if `items` does not say.
        more: other arguments of `tqdm`.
    """
    if not sys.stderr.isatty():
        more |= {"file": _LogLines(sys.stderr), "bar_format": LOG_LINE}
        more |= {"mininterval": LOG_INTERVAL_S, "maxinterval": LOG_INTERVAL_S}
    return tqdm(items, total=total, unit=f" {unit}", dynamic_ncols=True, **more)
