"""What the ops take and return: records of tensors, with the shape and dtype of each.

Names of sizes: bs requests, width tokens of a block that are verified (the anchor counted), V ids
of the vocabulary, K candidates of a drafted position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
CACHE_ALIGNMENT = 16  # elements between KV buffers: the wide stores of `context_kv` rely on it


class Block(NamedTuple):
    """One block a request: the anchor, then the positions to draft.

                 committed prefix          block
    position   0 ........ prefix-1 | prefix  prefix+1 ... prefix+block_size-1
    token id   (in the KV cache)   | anchor  mask     ... mask
    """

    ids: Tensor  # [bs, block_size] int64, column 0 is the anchor, the rest the mask token
    positions: Tensor  # [bs, block_size] int64, absolute
    slots: Tensor  # [bs, block_size] int64, KV slots that the block writes


class Tail(NamedTuple):
    """The drafter's candidates for each position, most likely token first."""

    ids: Tensor  # [rows, K] int64
    values: Tensor  # [rows, K] float32, their logits
    lse: Tensor | None  # [rows] float32, log of the sum of exp over the valid columns

    @property
    def probs(self) -> Tensor:
        """[rows, K] float32, the drafter's probability of each id.

        Raises:
            ValueError: the normaliser was not computed.
        """
        if self.lse is None:
            raise ValueError("probabilities need draft_tail(..., normaliser=True)")
        return torch.exp(self.values - self.lse[:, None])


class Proposal(NamedTuple):
    """What sampled drafts were drawn from: K tokens a position and their probabilities."""

    top_ids: Tensor  # [bs, width - 1, K] int64, distinct within a position
    top_probs: Tensor  # [bs, width - 1, K] float32, sums to 1 over K


class Filters(NamedTuple):
    """Which tokens a request may draw."""

    top_ks: Tensor  # [bs] int32; V or more: all
    top_ps: Tensor  # [bs] float32; 1: all
    min_ps: Tensor  # [bs] float32; 0: all


class Acceptance(NamedTuple):
    """What one verify commits. `commit_len` counts the bonus token: commit_len = accept_len + 1."""

    accept_len: Tensor  # [bs] int32, drafts accepted, 0 .. width-1
    commit_len: Tensor  # [bs] int32, tokens committed, 1 .. width
    bonus_ids: Tensor  # [bs] int64, the verifier's own token after the accepted drafts
    output_ids: Tensor  # [bs, width] int64, row i is committed up to commit_len[i]
    new_seq_lens: Tensor  # [bs] as the prefix lengths, tokens in the KV cache after the commit

    @classmethod
    def empty(
        cls, draft_ids: Tensor, prefix_lens: Tensor, output_ids: Tensor | None = None
    ) -> Acceptance:
        """Uninitialised memory for a kernel to fill.

        Args:
            draft_ids: [bs, width]: the sizes and the device.
            prefix_lens: [bs] integers: the dtype of the new lengths.
            output_ids: [bs, width] int64, if they are known already; None: the kernel writes them.
        """
        bs, device = draft_ids.shape[0], draft_ids.device
        if output_ids is None:
            output_ids = torch.empty(draft_ids.shape, dtype=torch.int64, device=device)
        return cls(
            accept_len=torch.empty(bs, dtype=torch.int32, device=device),
            commit_len=torch.empty(bs, dtype=torch.int32, device=device),
            bonus_ids=torch.empty(bs, dtype=torch.int64, device=device),
            output_ids=output_ids,
            new_seq_lens=torch.empty(bs, dtype=prefix_lens.dtype, device=device),
        )


class LayerCaches(NamedTuple):
    """KV buffers of all drafter layers; made once, by `of`, from buffers that stay in place."""

    keys: Sequence[Tensor]  # layers x [slots, heads, head_dim]
    values: Sequence[Tensor]  # layers x [slots, heads, head_dim]
    offsets: Tensor  # [layers, 2] int64, elements from keys[0] to the layer's keys and values
    scales: Tensor | None  # [layers, 2] float32, of keys and values; None: 1

    @classmethod
    def of(
        cls, keys: Sequence[Tensor], values: Sequence[Tensor], scales: Tensor | None = None
    ) -> LayerCaches:
        """Describe the buffers of a pool.

        Args:
            keys: a buffer a layer, [slots, heads, head_dim], bfloat16, float16, float32 or
                float8_e4m3fn; all of one shape, dtype and device.
            values: likewise.
            scales: [layers, 2] float32, what FP8 keys and values are divided by.

        Raises:
            ValueError: the buffers differ, a row is not contiguous, buffers do not lie a
                multiple of 16 elements apart, or scales come without FP8.
        """
        first = keys[0]
        for buffer in (*keys, *values):
            like_first = (buffer.shape, buffer.stride(), buffer.dtype, buffer.device) == (
                first.shape,
                first.stride(),
                first.dtype,
                first.device,
            )
            if not like_first or not buffer[0].is_contiguous():
                raise ValueError(
                    "expected buffers [slots, heads, head_dim] of one shape, stride and dtype with"
                    f" contiguous rows; got {tuple(buffer.shape)} {buffer.stride()} {buffer.dtype}"
                    f" beside {tuple(first.shape)} {first.stride()} {first.dtype}"
                )
        if scales is not None and first.dtype != FP8:
            raise ValueError(f"scales are for {FP8} buffers, got {first.dtype}")
        offsets = torch.tensor(
            [
                [(b.data_ptr() - first.data_ptr()) // first.element_size() for b in pair]
                for pair in zip(keys, values, strict=True)
            ],
        )
        if (offsets % CACHE_ALIGNMENT).any():
            raise ValueError(
                f"expected buffers a multiple of {CACHE_ALIGNMENT} elements apart,"
                f" got {offsets.tolist()}"
            )
        return cls(keys, values, offsets.to(first.device), scales)


class ServerShapes(NamedTuple):
    """Sizes and dtypes that the ops of one server will be given."""

    widths: tuple[int, ...]  # of blocks that are drafted and verified, ascending
    vocab_size: int
    head_ids: int  # of the vocabulary that the head has on this rank
    head_dtype: torch.dtype  # of the head's logits, as the drafter gets them
    head_columns: int  # of the head's logits: those ids, and padding
    top: int  # candidates of a drafted position, K
    dtype: torch.dtype  # of the drafter's projections
    layers: int  # of the drafter, as the following
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rotary_dtype: torch.dtype  # of the table of cosines and sines
    cache_dtype: torch.dtype
    rejection: str | None  # "block_verify" or "token_wise" for sampled drafts; None: they match
