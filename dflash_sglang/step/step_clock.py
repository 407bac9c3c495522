"""When decode steps begin, on the stream they run on."""

from __future__ import annotations

import time

import torch

Mark = float | torch.cuda.Event


class StepClock:
    """Marks the beginning of steps without waiting for the device."""

    def __init__(self, device: torch.device | str) -> None:
        self._on_stream = torch.device(device).type == "cuda"

    def mark(self) -> Mark:
        """Now: on CUDA, when the stream gets here."""
        if not self._on_stream:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, begin: Mark, end: Mark) -> float | None:
        """Seconds between two marks; None while the stream has not reached the later one."""
        if isinstance(begin, float) and isinstance(end, float):
            return end - begin
        assert isinstance(begin, torch.cuda.Event)
        assert isinstance(end, torch.cuda.Event)
        reached: bool = end.query()  # type: ignore[no-untyped-call]
        return begin.elapsed_time(end) / 1000 if reached else None
