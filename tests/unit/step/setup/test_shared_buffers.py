"""A narrower width's backend uses the block's large buffers, and keeps what is its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from torch import Tensor

from dflash_sglang.step.setup.shared_buffers import LENT, borrow_buffers

CONTEXT = 10


class FlashAttentionBackend:
    """What SGLang's allocates, in small."""

    def __init__(self, width: int, columns: int = CONTEXT) -> None:
        self.width = width
        self.columns = columns

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        assert max_num_tokens == max_bs * self.width
        self.target_verify_metadata: dict[Any, Any] = {
            "page_table": torch.zeros(max_bs, self.columns, dtype=torch.int32),
            "cu_seqlens_q": torch.arange(0, max_num_tokens + 1, self.width),
        }


class TritonAttnBackend:
    """Likewise."""

    max_context_len = CONTEXT

    def __init__(self, width: int) -> None:
        self.width = width
        self.given: Tensor | None = None

    def init_cuda_graph_state(
        self, max_bs: int, max_num_tokens: int, kv_indices_buf: Tensor | None = None
    ) -> None:
        self.given = kv_indices_buf
        if kv_indices_buf is None:
            kv_indices_buf = torch.zeros(max_num_tokens * CONTEXT, dtype=torch.int64)
        self.cuda_graph_kv_indices = kv_indices_buf
        self.cuda_graph_window_kv_indices = torch.zeros_like(kv_indices_buf)
        self.cuda_graph_num_kv_splits = torch.full((max_num_tokens,), 8)
        self._verify_mask = VerifyMask(
            torch.zeros(max_num_tokens * CONTEXT), TreeMaskMode.FULL_MASK, max_bs
        )


class Wrapper:
    """The plan buffers of a FlashInfer wrapper."""

    def __init__(self) -> None:
        self._int_workspace_buffer = torch.zeros(8)
        self._pin_memory_int_workspace_buffer = torch.zeros(8)


class FlashInferAttnBackend:
    """Likewise."""

    max_context_len = CONTEXT

    def __init__(self, width: int) -> None:
        self.width = width
        self.prefill_cuda_graph_metadata: dict[int, list[Wrapper]] = {}

    def init_cuda_graph_state(
        self, max_bs: int, max_num_tokens: int, kv_indices_buf: Tensor | None = None
    ) -> None:
        if kv_indices_buf is None:
            kv_indices_buf = torch.zeros(max_num_tokens * CONTEXT)
        self.cuda_graph_kv_indices = [kv_indices_buf, kv_indices_buf.clone()]

    def _create_prefill_wrappers(self, bs: int, use_custom_mask: bool = False) -> list[Wrapper]:
        return [Wrapper(), Wrapper()]


class Unknown(FlashAttentionBackend):
    """One that nobody has looked at."""


def shares(ours: Tensor, theirs: Tensor) -> bool:
    return ours.untyped_storage().data_ptr() == theirs.untyped_storage().data_ptr()


def both(kind: Any, narrow_bs: int = 3, whole_bs: int = 5, **narrow_args: Any) -> tuple[Any, Any]:
    """The backends of width 4 and of the block, after their buffers were allocated."""
    whole, narrow = kind(16), kind(4, **narrow_args)
    whole.init_cuda_graph_state(whole_bs, whole_bs * 16)
    borrow_buffers(narrow, whole)
    narrow.init_cuda_graph_state(narrow_bs, narrow_bs * 4)
    return narrow, whole


def test_page_tables_are_the_blocks_and_query_offsets_are_not() -> None:
    narrow, whole = both(FlashAttentionBackend)
    table = narrow.target_verify_metadata["page_table"]
    assert shares(table, whole.target_verify_metadata["page_table"])
    assert len(table) >= 3
    assert table[1].data_ptr() == whole.target_verify_metadata["page_table"][1].data_ptr()
    assert narrow.target_verify_metadata["cu_seqlens_q"].tolist() == [0, 4, 8, 12]
    assert whole.target_verify_metadata["cu_seqlens_q"].tolist()[1] == 16


def test_a_buffer_that_is_larger_or_of_other_rows_stays_its_own() -> None:
    narrow, whole = both(FlashAttentionBackend, narrow_bs=6)
    table = narrow.target_verify_metadata["page_table"]
    assert not shares(table, whole.target_verify_metadata["page_table"])
    assert table.shape == (6, CONTEXT)
    narrow, whole = both(FlashAttentionBackend, columns=CONTEXT - 1)
    table = narrow.target_verify_metadata["page_table"]
    assert not shares(table, whole.target_verify_metadata["page_table"])


def test_slot_lists_and_masks_are_the_blocks_and_constants_are_not() -> None:
    narrow, whole = both(TritonAttnBackend)
    for name in ("cuda_graph_kv_indices", "cuda_graph_window_kv_indices"):
        assert shares(getattr(narrow, name), getattr(whole, name))
        assert len(getattr(narrow, name)) >= 3 * 4 * CONTEXT
    assert narrow._verify_mask is whole._verify_mask
    assert not shares(narrow.cuda_graph_num_kv_splits, whole.cuda_graph_num_kv_splits)


def test_a_slot_list_is_not_even_allocated() -> None:
    """Of Triton, at 256 requests of 262,144 tokens, it would be 4 GB for a moment."""
    narrow, _ = both(TritonAttnBackend)
    assert narrow.given is not None
    assert len(narrow.given) == 0


def test_a_slot_list_that_the_blocks_is_too_short_for_is_allocated() -> None:
    narrow, whole = both(TritonAttnBackend, narrow_bs=21)
    assert narrow.given is None
    assert len(narrow.cuda_graph_kv_indices) == 21 * 4 * CONTEXT
    assert not shares(narrow.cuda_graph_kv_indices, whole.cuda_graph_kv_indices)


def test_wrappers_plan_into_the_blocks_of_the_same_batch_size() -> None:
    narrow, whole = both(FlashInferAttnBackend)
    whole.prefill_cuda_graph_metadata[2] = [Wrapper(), Wrapper()]
    for ours, theirs in zip(narrow.cuda_graph_kv_indices, whole.cuda_graph_kv_indices, strict=True):
        assert shares(ours, theirs)
    wrappers = narrow._create_prefill_wrappers(2)
    for ours, theirs in zip(wrappers, whole.prefill_cuda_graph_metadata[2], strict=True):
        assert vars(ours) == vars(theirs)
    alone = narrow._create_prefill_wrappers(3)  # the block has none of 3
    assert len(alone) == 2
    assert not shares(alone[0]._int_workspace_buffer, wrappers[0]._int_workspace_buffer)


def test_a_backend_that_is_not_listed_shares_nothing() -> None:
    narrow, whole = both(Unknown)
    table = narrow.target_verify_metadata["page_table"]
    assert not shares(table, whole.target_verify_metadata["page_table"])


@pytest.mark.parametrize("part", ["full_attn_backend", "decode_backend"])
def test_backends_inside_backends_are_found(part: str) -> None:
    class Outer(SimpleNamespace):
        def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
            getattr(self, part).init_cuda_graph_state(max_bs, max_num_tokens)

    narrow, whole = (Outer(**{part: FlashAttentionBackend(width)}) for width in (4, 16))
    whole.init_cuda_graph_state(5, 80)
    borrow_buffers(narrow, whole)
    narrow.init_cuda_graph_state(3, 12)
    ours, theirs = (getattr(one, part).target_verify_metadata for one in (narrow, whole))
    assert shares(ours["page_table"], theirs["page_table"])


def test_only_what_is_written_before_every_forward_is_lent() -> None:
    """By SGLang's own names: tables, slot lists, masks and scratch; no offsets, no lengths."""
    paths = {path for paths in LENT.values() for path in paths}
    assert not [path for path in paths if "cu_seqlens" in path or "indptr" in path]
