"""How long a computation takes, for choices made at start."""

from __future__ import annotations

import time
from collections.abc import Callable

REPEATS = 5

# Seconds of this thread's CPU time, which other processes on the machine do not lengthen.
thread_clock = time.thread_time


def fastest(run: Callable[[], object], clock: Callable[[], float] = thread_clock) -> float:
    """The shortest of a few runs, after one that warms caches.

    Args:
        run: the computation.
        clock: seconds.

    Returns:
        Seconds.
    """
    run()
    times = []
    for _ in range(REPEATS):
        start = clock()
        run()
        times.append(clock() - start)
    return min(times)
