"""`--speculative-draft-window-size`: the drafter sees only the latest tokens of the context."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool


class DraftWindow:
    """The drafter's own request-to-slot table, rebuilt each step from the verifier's.

        verifier row   slot(0) ............ slot(prefix-1) | block
        drafter row               slot(start) .. slot(prefix-1) | block

    `start` leaves the last `window` positions, rounded down to a page because paged backends read
    whole pages. Slots and absolute positions are the verifier's, so the KV cache itself is shared
    unchanged.
    """

    def __init__(self, window_size: int, page_size: int, block_size: int) -> None:
        self._window_size = window_size
        self._page_size = page_size
        self._longest_prefix = window_size + page_size - 1  # with what rounding to a page adds
        self._num_columns = self._longest_prefix + block_size

    def bind(self, target_pool: ReqToTokenPool, draft_pool: ReqToTokenPool) -> None:
        """Set the tables; they exist only once the pools are allocated."""
        self._verifier_table: Tensor = target_pool.req_to_token
        self._draft_table: Tensor = draft_pool.req_to_token

    def rebuild(
        self, batch: ScheduleBatch, seq_lens_cpu: Tensor, width: int
    ) -> tuple[Tensor, Tensor]:
        """Write the drafter's rows for this step.

        Args:
            batch: `seq_lens` are the committed lengths, [bs] int64.
            seq_lens_cpu: [bs] int32 on the host, prefix plus block, or a bound where the scheduler
                mirrors no lengths.
            width: tokens of the block, at most the block size.

        Returns:
            The prefix lengths the drafter sees [bs] int64, and on the host the same plus the block,
            or a bound of that.
        """
        prefix = batch.seq_lens
        start = self._start(prefix)
        columns = torch.arange(self._num_columns, device=prefix.device)
        # The verifier's row already holds the block's slots; columns past them are never read.
        source = (start[:, None] + columns).clamp(max=self._verifier_table.shape[1] - 1)
        rows = batch.req_pool_indices[:, None]
        kept = min(self._num_columns, self._draft_table.shape[1])
        self._draft_table[rows, columns[None, :kept]] = self._verifier_table[rows, source[:, :kept]]
        if batch.seq_lens_cpu is None:
            return prefix - start, seq_lens_cpu.clamp(max=self._longest_prefix + width)
        # Exact, not a bound: `BlockAttention` reads exactly this many keys.
        return prefix - start, seq_lens_cpu - self._start(seq_lens_cpu - width)

    def _start(self, prefix: Tensor) -> Tensor:
        """The first position that the drafter sees."""
        start = (prefix - self._window_size).clamp(min=0)
        return start - start % self._page_size
