"""What follows from which requests run together: found when one joins or leaves, not every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from sglang.srt.utils.common import async_h2d
from torch import Tensor

from dflash_sglang.step.request_options import max_commit

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch


FAR = 2**62  # tokens, beyond any context


class BatchFacts(NamedTuple):
    """Of the requests of a decode batch, in their order."""

    keys: Sequence[str]  # their ids
    limits: Sequence[int | None]  # most tokens each may commit in a step; None: a whole block
    drafts: Tensor | None  # [bs] int32, most drafts each may accept by that; None: all of all
    most_filters: int  # of top-k, top-p and min-p, those that a sampled one has at most


NOTHING_RUNS = BatchFacts((), (), None, 0)


class RunningBatch:
    """The facts of the batch that decodes.

    All of them are of requests as they arrived: ids, sampling parameters, options. So they hold as
    long as the same requests run in the same order, whatever list the scheduler keeps them in.
    """

    def __init__(self, block_size: int, device: torch.device | str) -> None:
        """Nothing runs yet.

        Args:
            block_size: of the drafter, the anchor counted.
            device: of the limits.
        """
        self._block_size = block_size
        self._device = device
        self._reqs: list[Req] = []
        self._facts = NOTHING_RUNS

    def facts(self, batch: ScheduleBatch) -> BatchFacts:
        """The facts of a batch; the same object while its requests are the same."""
        if batch.reqs != self._reqs:  # a request equals nothing but itself
            self._reqs = list(batch.reqs)
            limits = tuple(max_commit(req) for req in self._reqs)
            self._facts = BatchFacts(
                keys=tuple(req.rid for req in self._reqs),
                limits=limits,
                drafts=most_drafts(limits, self._block_size, self._device),
                most_filters=most_filters(self._reqs),
            )
        return self._facts

    def forget(self) -> None:
        """A request has finished: keep it no longer than the scheduler does."""
        self._reqs, self._facts = [], NOTHING_RUNS


def most_filters(reqs: Sequence[Req]) -> int:
    """How many of top-k, top-p and min-p a sampled one of these requests has, at most."""
    # SGLang gives a greedy request top-k 1.
    sampled = (req.sampling_params for req in reqs if req.sampling_params.top_k > 1)
    filters = ((one.top_k != TOP_K_ALL) + (one.top_p != 1.0) + (one.min_p > 0) for one in sampled)
    return max(filters, default=0)


def most_drafts(
    limits: Sequence[int | None], block_size: int, device: torch.device | str
) -> Tensor | None:
    """Most drafts that each request may accept by its limit, [bs] int32; None: all of all."""
    drafts = [block_size - 1 if limit is None else min(limit, block_size) - 1 for limit in limits]
    if min(drafts) == block_size - 1:
        return None
    return async_h2d(drafts, dtype=torch.int32, device=device)


def strictest(limit: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The smaller of two limits of each request, [bs] int32; None for none."""
    if limit is None or other is None:
        return other if limit is None else limit
    return torch.minimum(limit, other)


class CommitLimits:
    """The limits of a step: those of its requests, and none drafts past the drafter's range.

    That range takes lengths, and so changes from step to step. It is looked at again when the facts
    change, or when so many steps have run that a request could have come near it.
    """

    def __init__(self, block_size: int, draft_range: int | None) -> None:
        """Makes the limits of a server.

        Args:
            block_size: of the drafter, the anchor counted.
            draft_range: positions the drafter was made for; None if no request gets past them.
        """
        self._block_size = block_size
        self._range = draft_range
        self._facts: BatchFacts | None = None  # that the following was found for
        self._limits: Sequence[int | None] = ()
        self._near = False  # whether a request may be past the range
        self._steps = 0  # for which that holds

    def of(self, batch: ScheduleBatch, facts: BatchFacts) -> Sequence[int | None]:
        """Most tokens of each request, by the host's copy of its length; None for no limit.

        Call it once a step.

        Returns:
            The same object until a limit may have changed.
        """
        if self._range is None:
            return facts.limits
        if facts is not self._facts or self._steps == 0:
            self._look(batch, facts, self._range)
        self._steps -= 1
        return self._limits

    def on_device(self, batch: ScheduleBatch, facts: BatchFacts) -> Tensor | None:
        """Most drafts that each request may accept, [bs] int32; None where all may be accepted.

        Args:
            batch: `seq_lens` are the committed lengths; the host's may lag a step behind.
            facts: that `of` was called with.
        """
        if self._range is None or not self._near:
            return facts.drafts
        most, drafts = self._block_size - 1, facts.drafts
        if drafts is None:
            drafts = torch.full_like(batch.seq_lens, most, dtype=torch.int32)
        return drafts.masked_fill(batch.seq_lens + most >= self._range, 0)

    def _look(self, batch: ScheduleBatch, facts: BatchFacts, draft_range: int) -> None:
        """Which requests' next block reaches past the range, and for how long that is so."""
        block = self._block_size
        rooms = [  # positions between a request's next block and the end of the range
            draft_range - len(req.origin_input_ids) - len(req.output_ids) - (block - 1)
            for req in batch.reqs
        ]
        self._facts = facts
        self._limits = tuple(
            1 if room < 0 else limit for room, limit in zip(rooms, facts.limits, strict=True)
        )
        # In the n-th step from here on a request is at most n blocks on: n - 1 steps have run, and
        # one more whose tokens the host does not have yet.
        steps = min((room for room in rooms if room >= 0), default=FAR) // block
        self._near = steps < 1 or min(rooms) < 0
        self._steps = max(1, steps)
