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
        # [bs * (block_size - 1), columns], in the head's dtype: the op makes no float32 copy.
        logits = self._head.quant_method.apply(self._head, drafted, None)
        tail = draft_tail(logits, num_ids=self._num_ids, top=self._top_k, normaliser=False)
        values, ids = tail.values, tail.ids
        if self._tp_group.world_size > 1:
            all_values = self._tp_group.all_gather(values, dim=1)
            all_ids = self._tp_group.all_gather(ids + self._first_id, dim=1)
            values, ids = merge_ranks(all_values, all_ids, self._top_k)
        shape = (len(blocks), self._block_size - 1, self._top_k)
        return Candidates(ids.view(shape), values.view(shape))


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
