"""Several single tokens in one step of the scheduler, while nothing is drafted.

Without overlap the host prepares every step and waits for it. Plain decoding pays for that once a
token; so would a step of width 1, with the bookkeeping of speculation on top. A run of passes pays
once a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from dflash_kernels.types import Acceptance
from sglang.srt.runtime_context import get_exec, get_schedule, mamba_track_grid

from dflash_sglang.step.stop_ids import ending_ids, tokens_left

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


# What a run may take. Long enough to hide what the host does once a step, short enough for a new
# request, which waits for the run as it waits for a verify of a wide block.
RUN_SECONDS = 0.04
UNMEASURED_PASSES = 6  # of a run, as long as nobody knows what a pass takes
WASTE = 0.5  # of a pass, that a run may spend on requests that have ended


def run_passes(pass_seconds: float | None, block_size: int) -> int:
    """Passes of a run, at most.

    Args:
        pass_seconds: what one takes; None if that is unknown.
        block_size: tokens that slots are reserved for in every step, at least.
    """
    passes = UNMEASURED_PASSES if pass_seconds is None else int(RUN_SECONDS / pass_seconds)
    return max(1, min(passes, block_size))


def may_run_on(batch: ScheduleBatch) -> bool:
    """Whether a step may commit several plain tokens of each request.

    Not under overlap, where the host must not wait and hides its work already; and not where a
    token's rules need what the host has made of the one before: grammars, custom logit processors,
    log-probabilities; nor where a pass hands over more than its tokens, as routed experts.
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
    """When a run has to stop: once too much of it goes to requests that have ended.

    What a request says behind its end is dropped, as behind an end inside an accepted block. With
    many requests one ends every few tokens; a run that stopped each time would hide no work of the
    host. Only stop tokens and the length limit are looked at; a stop string is found after the run.
    """

    def __init__(self, batch: ScheduleBatch, *, strict: bool) -> None:
        """Look up where the requests of a batch end.

        Args:
            batch: decoding.
            strict: stop at the first end, where a state is handed on that cannot be shortened.
        """
        self.tokens = [0] * len(batch.reqs)  # of each request's in this run, those up to its end
        self._ending_ids = [ending_ids(req) for req in batch.reqs]
        self._left = [tokens_left(req) for req in batch.reqs]
        self._running = set(range(len(batch.reqs)))
        self._may_waste = 0.0 if strict else WASTE * len(batch.reqs)  # tokens
        self._wasted = 0
        self._boundary: int | None = None
        if batch.mamba_track_indices is not None:
            # The scheduler looks for a kept state at the last token of a run only.
            interval = mamba_track_grid(batch.tree_cache.page_size)
            self._boundary = int((interval - batch.seq_lens_cpu % interval).min())

    def reached(self, last: Acceptance, committed: int) -> bool:
        """Whether the run is over; to be asked after each of its passes.

        Args:
            last: of the last pass.
            committed: tokens of each request so far in this run.
        """
        ids = last.bonus_ids.tolist()  # waits for the device
        for row in list(self._running):
            self.tokens[row] = committed
            if committed >= self._left[row] or ids[row] in self._ending_ids[row]:
                self._running.remove(row)
        self._wasted += len(ids) - len(self._running)  # in the next pass
        return not self._running or self._wasted > self._may_waste or committed == self._boundary


def advance(batch: ScheduleBatch, last: Acceptance) -> None:
    """Let the batch be as the next pass finds it; the scheduler restores it after the step."""
    batch.seq_lens = last.new_seq_lens
    if batch.seq_lens_cpu is not None:
        batch.seq_lens_cpu = batch.seq_lens_cpu + 1
        batch.seq_lens_sum += len(batch.reqs)


def joined(run: Sequence[Acceptance]) -> Acceptance:
    """What a whole run commits: every token, without a draft among them."""
    last = run[-1]
    return Acceptance(
        accept_len=last.accept_len,
        commit_len=last.commit_len * len(run),
        bonus_ids=last.bonus_ids,
        output_ids=torch.cat([one.output_ids for one in run], dim=1),
        new_seq_lens=last.new_seq_lens,
    )
