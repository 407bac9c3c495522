"""What a request carries from one step to the next, and the KV slots reserved for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from sglang.srt.mem_cache.allocation import alloc_for_spec_decode
from sglang.srt.mem_cache.allocation_sizing import (
    get_alloc_page_size,
    get_alloc_reserve_per_decode,
    page_aligned_decode_alloc_lens,
)
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType
from sglang.srt.utils.common import async_h2d
from torch import Tensor

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


@dataclass
class DraftState(SpecInput):
    """Per-request state between steps: the anchor of the next block and the committed length.

    The scheduler relays both through its FutureMap when scheduling overlaps with the forward,
    and then only `future_indices` is kept in step with the batch. Without overlap the tensors
    themselves are.

    Source: `DFlashDraftInputV2` in sglang/srt/speculative/dflash_info_v2.py names the members that
        the scheduler reads.
    """

    bonus_tokens: Tensor  # [bs] int64, last committed token: the anchor of the next block
    new_seq_lens: Tensor  # [bs] int64, tokens in the KV cache
    future_indices: Tensor | None = None  # [bs] int64, rows of the FutureMap; set by the scheduler
    reserved_lens_cpu: Tensor | None = None  # [bs] int32 on the host, end of the reserved slots

    # Read by RelayPayload.from_draft_input; a DFlash block needs none of them.
    topk_p: ClassVar[None] = None
    topk_index: ClassVar[None] = None
    hidden_states: ClassVar[None] = None

    def __post_init__(self) -> None:
        super().__init__(spec_input_type=SpecInputType.DFLASH_DRAFT)
        self.num_tokens_per_req = 1
        self.num_tokens_for_logprob_per_req = 1

    @classmethod
    def empty(cls, device: torch.device | str) -> DraftState:
        """The state of a batch without requests."""
        none = torch.empty(0, dtype=torch.int64, device=device)
        return cls(bonus_tokens=none, new_seq_lens=none)

    def prepare_for_decode(self, batch: ScheduleBatch) -> None:
        """Reserve KV slots for the next step and set the host's copy of the lengths.

        Under overlap the host's committed length lags one step, in which up to one block may have
        been committed; so two blocks are reserved past it. Slots past the committed length are
        never given back between steps: the next step overwrites them, which is all that rollback of
        attention KV takes.
        """
        if batch.batch_size() == 0:
            return
        batch.maybe_evict_swa()
        page_size = batch.token_to_kv_pool_allocator.page_size
        allocated, reserved, num_new = page_aligned_decode_alloc_lens(
            batch.reqs, reserve=get_alloc_reserve_per_decode(), page_size=page_size
        )
        reserved_cpu = torch.tensor(reserved, dtype=torch.int32)
        alloc_for_spec_decode(
            batch.tree_cache,
            batch.req_to_token_pool,
            reqs=batch.reqs,
            req_pool_indices=batch.req_pool_indices,
            cur_kv_lens=async_h2d(allocated, dtype=torch.int32, device=batch.device),
            cur_kv_lens_cpu=torch.tensor(allocated, dtype=torch.int32),
            nxt_kv_lens=async_h2d(reserved, dtype=torch.int32, device=batch.device),
            nxt_kv_lens_cpu=reserved_cpu,
            num_needed_tokens=num_new,
            batch=batch,
        )
        committed = [req.kv.kv_committed_len for req in batch.reqs]
        for req in batch.reqs:
            req.decode_batch_idx += 1
        # Overlap replaces these with the published lengths before the forward.
        batch.seq_lens_cpu = torch.tensor(committed, dtype=torch.int64)
        batch.seq_lens_sum = sum(committed)
        self.reserved_lens_cpu = reserved_cpu

    def filter_batch(self, new_indices: Tensor, new_indices_cpu: list[int] | None = None) -> None:
        """Keep the requests at `new_indices`, in that order."""
        if self.reserved_lens_cpu is not None:
            keep = new_indices.tolist() if new_indices_cpu is None else new_indices_cpu
            self.reserved_lens_cpu = self.reserved_lens_cpu[keep]
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]
            return
        self.bonus_tokens = self.bonus_tokens[new_indices]
        self.new_seq_lens = self.new_seq_lens[new_indices]

    def merge_batch(self, other: DraftState | None) -> None:
        """Append the requests of `other`; a batch that has not run yet brings no state."""
        if other is None:
            return
        # Lengths are reserved anew before the next decode, and only read after that.
        self.reserved_lens_cpu = None
        if self.future_indices is not None and other.future_indices is not None:
            self.future_indices = torch.cat([self.future_indices, other.future_indices])
            return
        self.bonus_tokens = torch.cat([self.bonus_tokens, other.bonus_tokens])
        self.new_seq_lens = torch.cat([self.new_seq_lens, other.new_seq_lens])


def host_prefix_lens(batch: ScheduleBatch) -> Tensor:
    """The host's copy of the committed lengths, [bs] on the host.

    Exact where the scheduler mirrors lengths on the host; else an upper bound, the end of the
    reserved slots.
    """
    mirror = batch.seq_lens_cpu
    return batch.spec_info.reserved_lens_cpu if mirror is None else mirror


def mean_prefix_len(batch: ScheduleBatch) -> float:
    """Committed tokens of a request, on average; as exact as `host_prefix_lens`."""
    lens = host_prefix_lens(batch)
    return float(lens.sum()) / len(lens)


def host_block_lens(batch: ScheduleBatch, width: int) -> Tensor:
    """Lengths with a block of `width` tokens behind the prefix, as `host_prefix_lens`.

    The reserved slots hold the block already.
    """
    mirror = batch.seq_lens_cpu
    return batch.spec_info.reserved_lens_cpu if mirror is None else mirror + width


def req_to_token_headroom(headroom: int) -> int:
    """Columns a row of `req_to_token` needs past the context length.

    SGLang 0.5.23 sizes it for one block at page size 1, while a step reserves two: a request near
    the end of its context would write into the next request's row.

    Args:
        headroom: what `get_req_to_token_extra_context_len` answers.
    """
    return max(headroom, get_alloc_reserve_per_decode() + get_alloc_page_size())
