"""Multi-step decoding: several single tokens in one step, while nothing is drafted.

Without overlap the host prepares every step and waits for it. Plain decoding pays for that once a
token; so would a step of width 1, with the bookkeeping of speculation on top. Several forwards in
one step pay once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from dflash_kernels.types import Acceptance
from sglang.srt.runtime_context import get_exec, get_schedule, mamba_track_grid
from torch import Tensor

from dflash_sglang.step.end_of_request import ending_ids, tokens_left
from dflash_sglang.step.verify import StepOutput

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

# Seconds of a step. Long enough to hide the host's work of one step, short enough for a new
# request, which waits for the step as it waits for a verify of a wide block.
STEP_SECONDS = 0.04
UNMEASURED_FORWARDS = 6  # of a step, before the cost of one is measured
WASTE = 0.5  # of one forward, that a step may spend on requests that have ended

# One token of each request of a batch behind the given anchors, [bs] int64.
DecodeToken = Callable[["ScheduleBatch", Tensor], StepOutput]


class MultiStep:
    """Extends a step of width 1 by further tokens, where that is exact and saves time."""

    def __init__(self, *, recurrent: bool) -> None:
        """Makes it for a server.

        Args:
            recurrent: whether the verifier hands on a state that cannot be truncated, so that a
                step has to stop at the first end of a request.
        """
        self._recurrent = recurrent

    def extend(
        self, batch: ScheduleBatch, first: StepOutput, most: int, decode_token: DecodeToken
    ) -> StepOutput:
        """More tokens behind the first, until requests end or enough forwards are done.

        Args:
            batch: decoding; the scheduler restores its lengths after the step.
            first: the output of its first token.
            most: forwards of the step, that one counted; the same on all ranks.
            decode_token: decodes the next one.
        """
        if most == 1 or not can_multi_step(batch):
            return first
        ends = Ends(batch, strict=self._recurrent)
        outputs = [first]
        while not ends.reached(outputs[-1].accepted, len(outputs)) and len(outputs) < most:
            last = outputs[-1].accepted
            advance(batch, last)
            outputs.append(decode_token(batch, last.bonus_ids))
        for req, tokens in zip(batch.reqs, ends.tokens, strict=True):
            req.spec_verify_ct += tokens - 1  # SGLang counts one a step
        accepted = concat_acceptances([output.accepted for output in outputs])
        return outputs[-1]._replace(accepted=accepted, forwards=len(outputs))


def max_forwards(forward_seconds: float | None, block_size: int) -> int:
    """Forwards of a step, at most.

    Args:
        forward_seconds: of one; None if not measured.
        block_size: tokens that slots are reserved for in every step, at least.
    """
    if forward_seconds is None:
        forwards = UNMEASURED_FORWARDS
    else:
        forwards = int(STEP_SECONDS / forward_seconds)
    return max(1, min(forwards, block_size))


def can_multi_step(batch: ScheduleBatch) -> bool:
    """Whether a step may commit several tokens of each request without a draft.

    Not under overlap, where the host must not wait and its work is hidden already; and not where a
    token's rules need what the host has made of the one before: grammars, custom logit processors,
    log-probabilities; nor where a forward returns more than its tokens, such as routed experts.
    """
    features = get_exec().features
    return (
        get_schedule().disable_overlap_schedule
        and not batch.has_grammar
        and not batch.return_logprob
        and not batch.sampling_info.has_custom_logit_processor
        and not (features.enable_return_routed_experts or features.enable_return_indexer_topk)
    )


class Ends:
    """When a step has to stop: once too much of it goes to requests that have ended.

    Tokens of a request behind its end are dropped, as behind an end inside an accepted prefix. With
    many requests one ends every few tokens; a step that stopped each time would hide no work of the
    host. Only stop tokens and the length limit are checked; a stop string is found after the step.
    """

    def __init__(self, batch: ScheduleBatch, *, strict: bool) -> None:
        """Find where the requests of a batch end.

        Args:
            batch: decoding.
            strict: stop at the first end.
        """
        self.tokens = [0] * len(batch.reqs)  # of each request in this step, up to its end
        self._ending_ids = [ending_ids(req) for req in batch.reqs]
        self._left = [tokens_left(req) for req in batch.reqs]
        self._running = set(range(len(batch.reqs)))
        self._may_waste = 0.0 if strict else WASTE * len(batch.reqs)  # tokens
        self._wasted = 0
        self._boundary: int | None = None
        if batch.mamba_track_indices is not None:
            # The scheduler looks for a tracked state at the last token of a step only.
            interval = mamba_track_grid(batch.tree_cache.page_size)
            self._boundary = int((interval - batch.seq_lens_cpu % interval).min())

    def reached(self, last: Acceptance, committed: int) -> bool:
        """Whether the step has to stop; call it after each forward.

        Args:
            last: of the last forward.
            committed: tokens of each request so far in this step.
        """
        ids = last.bonus_ids.tolist()  # waits for the device
        for row in list(self._running):
            self.tokens[row] = committed
            if committed >= self._left[row] or ids[row] in self._ending_ids[row]:
                self._running.remove(row)
        self._wasted += len(ids) - len(self._running)  # in the next forward
        return not self._running or self._wasted > self._may_waste or committed == self._boundary


def advance(batch: ScheduleBatch, last: Acceptance) -> None:
    """Let the batch be as the next forward needs it; the scheduler restores it after the step."""
    batch.seq_lens = last.new_seq_lens
    if batch.seq_lens_cpu is not None:
        batch.seq_lens_cpu = batch.seq_lens_cpu + 1
        batch.seq_lens_sum += len(batch.reqs)


def concat_acceptances(acceptances: Sequence[Acceptance]) -> Acceptance:
    """Commit every token of several forwards, none of them a draft."""
    last = acceptances[-1]
    return Acceptance(
        accept_len=last.accept_len,
        commit_len=last.commit_len * len(acceptances),
        bonus_ids=last.bonus_ids,
        output_ids=torch.cat([one.output_ids for one in acceptances], dim=1),
        new_seq_lens=last.new_seq_lens,
    )
