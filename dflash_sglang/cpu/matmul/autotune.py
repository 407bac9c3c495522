"""Timing and the measured crossover between two implementations of a linear layer."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
from torch import Tensor

REPEATS = 5
# Token counts measured, largest first; the smallest at which the candidate still wins counts.
TOKEN_COUNTS = (64, 32, 16, 8, 4, 2)
NEVER = 1 << 62  # the crossover where the candidate does not win
GAIN = 0.95  # the candidate wins where it takes less than this share of the baseline's time

# Seconds of this thread's CPU time, which other processes on the machine do not lengthen.
thread_clock = time.thread_time


def best_time_s(run: Callable[[], object], clock: Callable[[], float] = thread_clock) -> float:
    """Shortest time of ``REPEATS`` runs, in seconds, after one run that warms the caches.

    Args:
        run: the computation.
        clock: returns seconds.
    """
    run()
    times = []
    for _ in range(REPEATS):
        start = clock()
        run()
        times.append(clock() - start)
    return min(times)


def crossover_tokens(
    baseline: Callable[[Tensor], object],
    candidate: Callable[[Tensor], object],
    in_features: int,
    timer: Callable[[Callable[[], object]], float] = best_time_s,
) -> int:
    """The token count from which on the candidate is faster than the baseline.

    Args:
        baseline: takes an input [tokens, in_features] float32.
        candidate: takes the same input.
        in_features: width of the input.
        timer: returns the seconds of a run.

    Returns:
        One of ``TOKEN_COUNTS``, or ``NEVER``.
    """
    crossover = NEVER
    for tokens in TOKEN_COUNTS:
        x = torch.ones(tokens, in_features)
        limit = GAIN * timer(functools.partial(baseline, x))
        if timer(functools.partial(candidate, x)) > limit:
            break
        crossover = tokens
    return crossover
