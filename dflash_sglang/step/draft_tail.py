"""From the drafter's hidden states to the tokens it proposes."""

from __future__ import annotations

from typing import Any

import torch
from dflash_kernels.draft_tail import draft_tail
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from dflash_sglang.core.sampled_draft import Candidates


class DraftTail:
    """Verifier head over the drafter's hidden states: the most likely tokens of every position.

    Called by the draft CUDA graph through SGLang's capture-tail hook, it keeps them (`kept`) where
    the graph puts them; without a graph the worker calls `top` itself.
    """

    def __init__(self, lm_head: Any, block_size: int, max_batch_size: int, top_k: int) -> None:
        self._head = lm_head
        self._block_size = block_size
        self._top_k = top_k
        self._tp_group = get_parallel().tp_group
        shard = lm_head.shard_indices
        # Rows past num_org are padding or LoRA vocabulary: neither is ever drafted.
        self._num_ids: int = shard.num_org_elements
        self._first_id: int = shard.org_vocab_start_index
        device = next(lm_head.parameters()).device
        shape = (max_batch_size, block_size - 1, top_k)
        self.buffers = (
            torch.zeros(shape, dtype=torch.int64, device=device),
            torch.zeros(shape, dtype=torch.float32, device=device),
            torch.zeros(shape[:2], dtype=torch.float32, device=device),
        )

    def __call__(self, hidden: Tensor, input_ids: Tensor | None = None) -> None:
        """Keep the candidates of `hidden`; the signature is the capture-tail hook's."""
        for buffer, values in zip(self.buffers, self.top(hidden, normaliser=True), strict=True):
            assert values is not None
            buffer[: values.shape[0]].copy_(values)

    def kept(self, bs: int) -> Candidates:
        """What the last replay left for the first `bs` requests."""
        return Candidates(*(buffer[:bs] for buffer in self.buffers))

    def top(self, hidden: Tensor, *, normaliser: bool) -> Candidates:
        """Most likely tokens of every position after the anchor.

        Args:
            hidden: [bs * block_size, hidden] drafter output after its final norm.
            normaliser: whether the candidates' `lse` is wanted.

        Returns:
            K = top_k candidates; ties go to the smallest id, on any number of ranks.
        """
        blocks = hidden.view(-1, self._block_size, hidden.shape[-1])
        drafted = blocks[:, 1:].reshape(-1, hidden.shape[-1])
        # [bs * (block_size - 1), columns], in the head's dtype: the op makes no float32 copy.
        logits = self._head.quant_method.apply(self._head, drafted, None)
        tail = draft_tail(logits, num_ids=self._num_ids, top=self._top_k, normaliser=normaliser)
        values, ids, lse = tail.values, tail.ids, tail.lse
        if self._tp_group.world_size > 1:
            all_values = self._tp_group.all_gather(values, dim=1)
            all_ids = self._tp_group.all_gather(ids + self._first_id, dim=1)
            values, ids = merge_ranks(all_values, all_ids, self._top_k)
            if lse is not None:
                lse = self._tp_group.all_gather(lse[:, None], dim=1).logsumexp(dim=1)
        shape = (len(blocks), self._block_size - 1, self._top_k)
        return Candidates(
            ids.view(shape), values.view(shape), None if lse is None else lse.view(shape[:2])
        )


def merge_ranks(values: Tensor, ids: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The K largest of what all ranks found in their parts of the vocabulary.

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
