"""The number of torch threads in the scheduler process."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from dflash_sglang.errors import PlatformError

logger = logging.getLogger(__name__)

VARIABLE = "DFLASH_SGLANG_CPU_THREADS"
# The tokenizer with the HTTP server and the detokenizer together were measured to need less than
# one core beside a scheduler that streams a small model at full speed.
CORES_FOR_OTHER_PROCESSES = 1


class ThreadChoice(NamedTuple):
    """A thread count and why."""

    threads: int
    reason: str


def choose_threads(environment: Mapping[str, str], cores: int, ranks: int = 1) -> ThreadChoice:
    """Choose the thread count of one scheduler process.

    One thread too many costs far more than one too few: while another process occupies a core,
    every parallel region waits for the thread that is not running.

    Args:
        environment: the process environment; ``DFLASH_SGLANG_CPU_THREADS`` decides when set.
        cores: physical cores this process may use.
        ranks: scheduler processes that share them.

    Returns:
        The count, at least 1, and the reason.

    Raises:
        PlatformError: the variable is not a positive whole number.
    """
    given = environment.get(VARIABLE)
    if given is not None:
        if not (given.isascii() and given.isdecimal() and int(given) > 0):
            raise PlatformError(
                f"{VARIABLE}={given!r} is not a positive whole number; unset it or give one"
            )
        return ThreadChoice(int(given), f"set by {VARIABLE}")
    count = max(1, (cores - CORES_FOR_OTHER_PROCESSES) // ranks)
    shared = f", shared by {ranks} ranks" if ranks > 1 else ""
    return ThreadChoice(
        count,
        f"{cores} physical cores{shared}, {CORES_FOR_OTHER_PROCESSES} left to the other processes",
    )


def physical_cores() -> int:
    """Physical cores this process may run on: no hyper-threads, a container's quota respected."""
    if not hasattr(os, "sched_getaffinity"):  # not Linux
        return os.cpu_count() or 1
    allowed = os.sched_getaffinity(0)
    siblings = {_siblings(cpu) for cpu in allowed}
    return max(1, min(len(siblings), _quota(Path("/sys/fs/cgroup/cpu.max"))))


def _siblings(cpu: int) -> str:
    """Hardware threads on the core of a CPU, as the kernel lists them."""
    listing = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return listing.read_text(encoding="ascii") if listing.is_file() else str(cpu)


def _quota(file: Path) -> int:
    """Whole CPUs of the control group's quota; a very large number without a quota."""
    unlimited = 1 << 16
    if not file.is_file():
        return unlimited
    quota, period = file.read_text(encoding="ascii").split()
    return unlimited if quota == "max" else int(quota) // int(period)


def set_threads() -> None:
    """Set torch's thread count in this process and log it with the reason."""
    from sglang.srt.runtime_context import get_parallel

    choice = choose_threads(os.environ, physical_cores(), get_parallel().tp_size)
    torch.set_num_threads(choice.threads)
    logger.info("CPU platform: %d torch thread(s); %s", choice.threads, choice.reason)
