"""Progress of a run of minutes: one line on a terminal, a line now and then in a log."""

import sys
import threading
import time
from types import TracebackType
from typing import Self, TextIO

TERMINAL_INTERVAL_S = 0.2
LOG_INTERVAL_S = 15.0


class Progress:
    """Shows the latest text; any thread may call `show`.

    On a terminal one line rewrites itself. Elsewhere, where a carriage return would run all states
    together, each shown text is a line of its own, and there are few of them.

    Args:
        stream: standard error when None.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._interval = TERMINAL_INTERVAL_S if self._is_terminal else LOG_INTERVAL_S
        self._next = 0.0
        self._lock = threading.Lock()

    def show(self, text: str, *, begins: bool = False) -> None:
        """Shows `text` unless another was shown a moment ago; always when something `begins`."""
        with self._lock:
            now = time.monotonic()
            if begins or now >= self._next:
                self._next = now + self._interval
                self._write(f"\r{text}\x1b[K" if self._is_terminal else f"{text}\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_terminal:
            self._write("\n")
