"""The width of each step: asks the policy, and tells it what became of the step."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from dflash_sglang.core.width import (
    CostTable,
    ObservedStep,
    RunningMedian,
    WidthPolicy,
    WidthSettings,
)
from dflash_sglang.step.draft_limits import DraftLimits
from dflash_sglang.step.multi_step import may_run_on, run_passes
from dflash_sglang.step.step_clock import Mark, StepClock

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


class Choice(NamedTuple):
    """How a decode step is to run."""

    width: int  # drafted tokens of each request, the anchor counted
    passes: int = 1  # above 1 only at width 1: so many one after another, at most
    confident: bool = False  # whether `narrow` wants the drafter's confidences


@dataclass
class Step:
    """A decode step that the policy has not heard of yet."""

    keys: Sequence[str]
    width: int
    begin: Mark
    passes: int = 1
    done: Mark | None = None  # its passes have run
    end: Mark | None = None  # beginning of the next decode step
    disturbed: bool = False  # something else ran in between
    verified: int | None = None  # tokens verified of each request; None: all that were drafted
    confidences: Sequence[Sequence[float]] | None = None
    accept_lens: Sequence[int] | None = None  # None until the host knows them


class Widths:
    """Chooses widths for a worker whose results the host learns one step late."""

    def __init__(
        self,
        block_size: int,
        settings: WidthSettings,
        limits: DraftLimits,
        device: torch.device | str,
    ) -> None:
        self._limits = limits
        self.ladder = settings.ladder(block_size)
        self._block_size = block_size
        self._settings = settings
        self._clock = StepClock(device)
        self._steps: deque[Step] = deque()
        self._limited: dict[str, int] = {}  # what the policy was told of a request
        self._policy: WidthPolicy | None = None
        self._costs: CostTable | None = None
        self._tp_group = get_parallel().tp_group
        self._chosen: Counter[int] = Counter()
        self._between = RunningMedian()  # seconds from a step's passes to the next step

    @property
    def adaptive(self) -> bool:
        """Whether there is anything to choose."""
        return len(self.ladder) > 1

    def start(self, costs: CostTable) -> None:
        """Choose from now on; until then every step has the widest width."""
        self._costs = costs
        self._policy = WidthPolicy(self._block_size, costs, self._settings)

    def choose(self, batch: ScheduleBatch) -> Choice:
        """How the step that is about to run does so."""
        width = self.ladder[-1] if self._policy is None else self._choose(self._policy, batch)
        self._chosen[width] += 1
        if width == 1:
            return Choice(width, passes=self._passes(batch) if may_run_on(batch) else 1)
        return Choice(width, confident=self._asks(len(batch.reqs), width))

    def _asks(self, batch_size: int, width: int) -> bool:
        if self._policy is None or batch_size > self._settings.confident_batch:
            return False
        return bool(self._agreed(self._policy.asks(batch_size, width)))

    def _passes(self, batch: ScheduleBatch) -> int:
        seconds = None if self._costs is None else self._costs.seconds(len(batch.reqs), 1)
        return self._agreed(run_passes(seconds, self._block_size))

    def narrow(self, confidences: Tensor) -> int:
        """How many of the tokens drafted for the chosen step to verify.

        Args:
            confidences: [bs, width - 1] float32, the drafter's probability of each draft; the host
                waits for them.
        """
        assert self._policy is not None
        step = self._steps[-1]
        step.confidences = confidences.tolist()
        verified = self._agreed(self._policy.narrow(step.keys, step.width, step.confidences))
        step.verified = verified
        self._chosen[step.width] -= 1
        self._chosen[verified] += 1
        return verified

    def ran(self, passes: int = 1) -> None:
        """The step that was chosen last has run, in so many passes."""
        if passes > 1:
            self._chosen[1] += passes - 1
        if self._policy is not None:
            self._steps[-1].passes = passes
            self._steps[-1].done = self._clock.mark()

    def steps_by_width(self) -> dict[str, int]:
        """Passes of the verifier over decoding requests so far, by their width."""
        return {str(width): self._chosen[width] for width in self.ladder}

    def _choose(self, policy: WidthPolicy, batch: ScheduleBatch) -> int:
        now = self._clock.mark()
        if self._steps and self._steps[-1].end is None:
            self._steps[-1].end = now
        self._report(policy)
        keys = [req.rid for req in batch.reqs]
        for req in batch.reqs:
            most = self._limits.most(req)
            if most is not None and self._limited.get(req.rid) != most:
                policy.limit(req.rid, most)
                self._limited[req.rid] = most
        width = self._agreed(policy.choose(keys))
        self._steps.append(Step(keys, width, now))
        return width

    def disturb(self) -> None:
        """Something else than a decode step runs: when the next begins says nothing."""
        if self._steps:
            self._steps[-1].disturbed = True

    def verified(self, accept_lens: Sequence[int]) -> None:
        """Accepted drafts of every request of the oldest step that has none yet."""
        waiting = (step for step in self._steps if step.accept_lens is None)
        step = next(waiting, None)
        if step is not None:
            step.accept_lens = accept_lens

    def finished(self, rid: str) -> None:
        """A request is done."""
        self._limited.pop(rid, None)
        if self._policy is not None:
            self._policy.forget(rid)

    def _report(self, policy: WidthPolicy) -> None:
        while self._steps and self._steps[0].accept_lens is not None:
            step = self._steps.popleft()
            assert step.accept_lens is not None
            policy.observe(
                ObservedStep(
                    step.keys,
                    step.accept_lens,
                    step.width,
                    self._seconds(step),
                    step.passes,
                    step.verified,
                    step.confidences,
                )
            )

    def _seconds(self, step: Step) -> float | None:
        """What a step took, with what lies between it and the next, or usually does."""
        if step.done is None:
            return None
        passes = self._clock.seconds(step.begin, step.done)
        if passes is None or step.end is None or step.disturbed:
            return None if passes is None else passes + self._between.value
        between = self._clock.seconds(step.done, step.end)
        if between is None:
            return passes + self._between.value
        self._between.add(between)
        return passes + between

    def _agreed(self, number: int) -> int:
        """The number of rank 0: ranks measure different times."""
        if self._tp_group.world_size == 1:
            return number
        shared = torch.tensor([number])
        torch.distributed.broadcast(
            shared, src=self._tp_group.ranks[0], group=self._tp_group.cpu_group
        )
        return int(shared)
