"""From the drafter's hidden states to the tokens it proposes."""

from __future__ import annotations

from typing import Any

import torch
from dflash_kernels.draft_tail import draft_tail
from dflash_kernels.types import Tail
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.dflash_utils import is_dense_head_weight
from torch import Tensor

from dflash_sglang.core.sampled_draft import Candidates
from dflash_sglang.errors import PairError
from dflash_sglang.step.draft.narrowing import VerifyBound


class DraftTail:
    """Verifier head over the drafter's hidden states: the most likely tokens of every position.

    Called by the draft CUDA graph through SGLang's capture-tail hook, it keeps them (`kept`) where
    the graph puts them; without a graph the worker calls `top` itself.
    """

    def __init__(
        self,
        lm_head: Any,
        block_size: int,
        max_batch_size: int,
        top_k: int,
        bound: VerifyBound | None = None,
    ) -> None:
        """Allocate what a graph writes.

        Args:
            lm_head: of the verifier.
            block_size: of the drafts, the anchor counted.
            max_batch_size: requests.
            top_k: candidates of a position.
            bound: set by the drafts of a single request; None for no narrowing.

        Raises:
            PairError: the head is split over ranks without saying which ids a rank has.
        """
        self._head = lm_head
        self._block_size = block_size
        self._top_k = top_k
        self._bound = bound
        self._tp_group = get_parallel().tp_group
        self._num_ids, self._first_id = ids_of(lm_head, self._tp_group.world_size)
        self._dtype = dtype_of(lm_head)
        device = next(lm_head.parameters()).device
        shape = (max_batch_size, block_size - 1, top_k)
        self.buffers = (
            torch.zeros(shape, dtype=torch.int64, device=device),
            torch.zeros(shape, dtype=torch.float32, device=device),
        )

    def __call__(self, hidden: Tensor, input_ids: Tensor | None = None) -> None:
        """Keep the candidates of `hidden`; the signature is the capture-tail hook's."""
        for buffer, values in zip(self.buffers, self.top(hidden), strict=True):
            buffer[: values.shape[0]].copy_(values)

    def kept(self, bs: int) -> Candidates:
        """Candidates of the first `bs` requests of the last replay."""
        return Candidates(*(buffer[:bs] for buffer in self.buffers))

    def top(self, hidden: Tensor) -> Candidates:
        """Most likely tokens of every position after the anchor.

        Args:
            hidden: [bs * block_size, hidden] drafter output after its final norm.

        Returns:
            K = top_k candidates; ties go to the smallest id, on any number of ranks.
        """
        blocks = hidden.view(-1, self._block_size, hidden.shape[-1])
        drafted = blocks[:, 1:].reshape(-1, hidden.shape[-1])
        if self._dtype is not None:
            drafted = drafted.to(self._dtype)
        # [bs * (block_size - 1), columns], in the head's dtype: the op makes no float32 copy.
        logits = self._head.quant_method.apply(self._head, drafted, None)
        bounded = self._bound is not None and len(blocks) == 1
        tail = draft_tail(logits, num_ids=self._num_ids, top=self._top_k, normaliser=bounded)
        if self._tp_group.world_size > 1:
            tail = gather_ranks(tail, self._first_id, self._tp_group)
        if self._bound is not None and tail.lse is not None:
            self._bound.decide(tail.values[:, 0], tail.lse)
        shape = (len(blocks), self._block_size - 1, self._top_k)
        return Candidates(tail.ids.view(shape), tail.values.view(shape))


def ids_of(lm_head: Any, ranks: int) -> tuple[int, int]:
    """How many token ids this rank's part of a head has, and the first of them.

    Rows past them are padding or LoRA vocabulary: neither is ever drafted.

    Raises:
        PairError: there are several ranks, and the head does not say.
    """
    shard = getattr(lm_head, "shard_indices", None)
    if shard is not None:
        return shard.num_org_elements, shard.org_vocab_start_index
    if ranks > 1:
        raise PairError(
            f"The verifier's head, {type(lm_head).__name__}, does not say which token ids each of "
            f"{ranks} ranks has. Serve this verifier on one GPU."
        )
    return len(lm_head.weight), 0


def dtype_of(lm_head: Any) -> torch.dtype | None:
    """What a head multiplies and returns; None: what it is given.

    It may be wider than the drafter, as of a model with float32 logits. A quantised one takes what
    its own method converts.
    """
    weight: Tensor | None = getattr(lm_head, "weight", None)
    return weight.dtype if weight is not None and is_dense_head_weight(weight) else None


def gather_ranks(tail: Tail, first_id: int, group: Any) -> Tail:
    """The tail over the vocabulary parts of all ranks, in one gather.

    Args:
        tail: of this rank's part, ids from 0 on.
        first_id: of this rank.
        group: has `all_gather` and `world_size`.
    """
    rows, top_k = tail.ids.shape
    packed = [tail.values.view(torch.int32), (tail.ids + first_id).to(torch.int32)]
    if tail.lse is not None:
        packed.append(tail.lse.view(torch.int32).unsqueeze(1))
    gathered = group.all_gather(torch.cat(packed, dim=1), dim=1)
    by_rank = gathered.view(rows, group.world_size, -1)
    values, ids, lse = by_rank.split_with_sizes([top_k, top_k, by_rank.shape[2] - 2 * top_k], dim=2)
    merged_values, merged_ids = merge_ranks(
        values.reshape(rows, -1).view(torch.float32), ids.reshape(rows, -1).long(), top_k
    )
    if tail.lse is None:
        return Tail(merged_ids, merged_values, None)
    return Tail(merged_ids, merged_values, lse.reshape(rows, -1).view(torch.float32).logsumexp(1))


def merge_ranks(values: Tensor, ids: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The K largest logits over the vocabulary parts of all ranks.

    Args:
        values: [rows, ranks * top_k] float32, each rank's largest logits first.
        ids: [rows, ranks * top_k] int64. Ranks hold ascending ids, so among equal values the
            smallest id comes first.
        top_k: K.

    Returns:
        Values and ids, [rows, top_k] each, largest first, the smallest id among equals.
    """
    largest, order = values.sort(dim=1, descending=True, stable=True)
    return largest[:, :top_k], ids.gather(1, order[:, :top_k])
