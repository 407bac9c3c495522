"""The width of each decode step, and what the policy learns from it."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from dflash_kernels.verify_bound import CLASSES
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from dflash_sglang.core.width import (
    CostTable,
    ObservedStep,
    RunningMedian,
    WidthPolicy,
    WidthSettings,
)
from dflash_sglang.step.draft.narrowing import VerifyBound, read_bound
from dflash_sglang.step.multi_step import max_forwards

Mark = float | torch.cuda.Event  # a point in time, of the host or of the stream


@dataclass
class DecodeStep:
    """One decode step, from its beginning to the outcome that the policy learns from."""

    keys: Sequence[str]  # ids of its requests
    begin: Mark | None = None  # not marked without a policy
    width: int = 0  # 0 until it is chosen
    most_forwards: int = 1  # of the verifier, at width 1
    forwards: int = 1  # of the verifier; above 1 in multi-step decoding
    end: Mark | None = None  # its forwards are done
    next_begin: Mark | None = None  # of the next decode step
    interrupted: bool = False  # something else ran before the next decode step
    accept_lens: Sequence[int] | None = None  # None until the host has them
    bounded: bool = False  # its drafts decide how much is verified
    bound: Tensor | None = None  # what they decided; on the host as soon as the outcome is


class WidthController:
    """Runs the policy for a worker whose outcomes reach the host late.

    A decode step goes through `begin`, `choose` and `end`; its outcome arrives later, at
    `report_acceptance`. `learn` hands complete steps to the policy, in order.
    """

    def __init__(
        self,
        block_size: int,
        settings: WidthSettings,
        device: torch.device | str,
        bound: VerifyBound | None = None,
    ) -> None:
        """Makes every step as wide as allowed, until there is a policy.

        Args:
            block_size: of the drafter, the anchor counted.
            settings: of the width.
            device: that steps run on.
            bound: of a single request's verify; None for no narrowing.
        """
        self.ladder = settings.ladder(block_size)
        self._block_size = block_size
        self._settings = settings
        self._clock = StepClock(device)
        self._bound = bound
        self._steps: deque[DecodeStep] = deque()  # not learned from yet, the oldest first
        self._limits: dict[str, int] = {}  # that the policy has, by request
        self._known_limits: Sequence[int | None] = ()  # of the last step
        self._policy: WidthPolicy | None = None
        self._costs: CostTable | None = None
        self._tp_group = get_parallel().tp_group
        self._forwards: Counter[int] = Counter()  # by width
        self._narrowed = Counter(steps=0, drafted=0, verified=0)  # of single requests, in tokens
        self._gap = RunningMedian()  # seconds from a step's forwards to the next step

    @property
    def adaptive(self) -> bool:
        """Whether there is more than one width."""
        return len(self.ladder) > 1

    def start(self, costs: CostTable, largest_batch: Mapping[int, int] | None = None) -> None:
        """Use the policy from now on; until then every step has the widest width.

        Args:
            costs: measured at start.
            largest_batch: as of `WidthPolicy`.
        """
        self._costs = costs
        self._policy = WidthPolicy(self._block_size, costs, self._settings, largest_batch)

    def begin(self, keys: Sequence[str], context: float = 0.0) -> DecodeStep:
        """A decode step begins; the time of the previous one ends here.

        Args:
            keys: ids of its requests.
            context: tokens of a request before the block, on average.
        """
        step = DecodeStep(keys)
        if self._costs is not None:
            self._costs.at(context)
        if self._policy is not None:
            step.begin = self._clock.mark()
            if self._steps and self._steps[-1].next_begin is None:
                self._steps[-1].next_begin = step.begin
            self._steps.append(step)
        return step

    def learn(self) -> None:
        """Hand the steps to the policy whose outcomes have arrived."""
        while (
            self._policy is not None
            and self._steps
            and (accept_lens := self._steps[0].accept_lens) is not None
        ):
            step = self._steps.popleft()
            bound = None if step.bound is None else read_bound(step.bound)
            if bound is not None:
                self._narrowed["steps"] += 1
                self._narrowed["drafted"] += step.width
                self._narrowed["verified"] += bound.verified
            seconds = self._seconds(step)
            self._policy.observe(
                ObservedStep(step.keys, accept_lens, step.width, seconds, step.forwards, bound)
            )

    def choose(self, step: DecodeStep, limits: Sequence[int | None]) -> int:
        """The width of a step: tokens of each request to draft and verify, the anchor counted.

        Args:
            step: that has begun.
            limits: most tokens that each request may commit, None for a whole block; the same
                object where they are those of the step before.
        """
        step.width = self.ladder[-1]
        step.most_forwards = max_forwards(None, self._block_size)
        if self._policy is not None:
            if limits is not self._known_limits:
                self._limit(self._policy, step.keys, limits)
                self._known_limits = limits
            self._choose(step, self._policy)
        return step.width

    def _choose(self, step: DecodeStep, policy: WidthPolicy) -> None:
        """Agree on a width, and on all that follows from times: they differ between ranks."""
        bound = self._bound if len(step.keys) == 1 else None
        width, batch_size = policy.choose(step.keys), len(step.keys)
        seconds = self.seconds(batch_size, 1) if width == 1 else None
        numbers: list[float] = [width, max_forwards(seconds, self._block_size)]
        if bound is not None:
            tables = policy.bound_tables(step.keys[0], width)
            numbers += [] if tables is None else [*tables.acceptance, *tables.prices]
        agreed = self._agree(numbers)
        step.width, step.most_forwards, entries = int(agreed[0]), int(agreed[1]), agreed[2:]
        if bound is not None and step.width > 1:
            bound.set_tables(step.width, entries[: CLASSES + step.width])
            step.bounded = True

    def _limit(
        self, policy: WidthPolicy, keys: Sequence[str], limits: Sequence[int | None]
    ) -> None:
        """Tell the policy the limits that differ from those it has."""
        for key, limit in zip(keys, limits, strict=True):
            if self._limits.get(key) != limit:
                policy.limit(key, self._block_size if limit is None else limit)
                if limit is None:
                    del self._limits[key]
                else:
                    self._limits[key] = limit

    def end(self, step: DecodeStep, forwards: int) -> None:
        """The forwards of a step have been launched."""
        self._forwards[step.width] += forwards
        if self._policy is not None:
            step.forwards = forwards
            step.end = self._clock.mark()
            if self._bound is not None and step.bounded:
                step.bound = self._bound.copy_to_host(step.width)

    def interrupt(self) -> None:
        """Something else runs: the gap to the next decode step is not decode time."""
        if self._steps:
            self._steps[-1].interrupted = True

    def report_acceptance(self, accept_lens: Sequence[int]) -> None:
        """The outcome of the oldest step without one: accepted drafts of each request."""
        waiting = (step for step in self._steps if step.accept_lens is None)
        step = next(waiting, None)
        if step is not None:
            step.accept_lens = accept_lens

    def forget(self, rid: str) -> None:
        """Drop a finished request."""
        self._limits.pop(rid, None)
        if self._policy is not None:
            self._policy.forget(rid)

    def forwards_by_width(self) -> dict[str, int]:
        """Forwards of the verifier over decoding requests so far."""
        return {str(width): self._forwards[width] for width in self.ladder}

    def narrowed(self) -> dict[str, int] | None:
        """Steps of single requests so far, and tokens they drafted and verified, anchors counted.

        None where verifies are as wide as drafts.
        """
        return None if self._bound is None else dict(self._narrowed)

    def seconds(self, batch_size: int, width: int) -> float | None:
        """Expected seconds of a step; None if not measured."""
        return None if self._costs is None else self._costs.seconds(batch_size, width)

    def _agree(self, numbers: Sequence[float]) -> Sequence[float]:
        """The numbers of rank 0, in one broadcast: more in a step would cost its host time.

        Other ranks may have fewer or more: what rank 0 does not have is 0.
        """
        if self._tp_group.world_size == 1:
            return numbers
        shared = torch.zeros(2 + CLASSES + self._block_size, dtype=torch.float64)
        shared[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        torch.distributed.broadcast(
            shared, src=self._tp_group.ranks[0], group=self._tp_group.cpu_group
        )
        agreed: list[float] = shared.tolist()
        return agreed

    def _seconds(self, step: DecodeStep) -> float | None:
        """Duration of a step up to the next one, measured or with the usual gap between them."""
        if step.begin is None or step.end is None:
            return None
        forwards = self._clock.seconds(step.begin, step.end)
        if forwards is None or step.next_begin is None or step.interrupted:
            return None if forwards is None else forwards + self._gap.value
        gap = self._clock.seconds(step.end, step.next_begin)
        if gap is None:
            return forwards + self._gap.value
        self._gap.add(gap)
        return forwards + gap


class StepClock:
    """Times steps on the stream they run on, without waiting for the device."""

    def __init__(self, device: torch.device | str) -> None:
        self._on_stream = torch.device(device).type == "cuda"

    def mark(self) -> Mark:
        """Now; on CUDA, when the stream gets here."""
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
