"""What the slots of a block see when attention is planned from lengths: key by key."""

import pytest
import torch
from torch import Tensor

from dflash_sglang.core.draft_attention import AttentionWindow, PagedLayout, paged_layout
from dflash_sglang.drafter.reference import visibility

PREFIXES = torch.tensor([0, 1, 2, 5, 15, 16, 17, 31, 32, 33, 40, 100])


def seen_by_kernel(
    layout: PagedLayout, row: int, block_size: int, window: AttentionWindow
) -> Tensor:
    """FlashInfer's rule applied to a layout: [block_size, kv_len] bool.

    From `DefaultAttention` and `logits_mask`, with the arithmetic of unsigned numbers left out; see
    tests/unit/step/test_flashinfer_plan.py for the lines themselves.
    """
    kv_len = int(layout.kv_lens[row])
    slot, key = torch.arange(block_size)[:, None], torch.arange(kv_len)
    seen = torch.ones(block_size, kv_len, dtype=torch.bool)
    if window.causal:
        seen &= ~(key + block_size > kv_len + slot)
    if window.window_left >= 0:
        seen &= key + block_size + window.window_left >= kv_len + slot
    return seen


def keys_seen(
    layout: PagedLayout, row: int, block_size: int, window: AttentionWindow
) -> list[set[int]]:
    """Absolute positions that each slot sees."""
    start = int(layout.starts[row])
    seen = seen_by_kernel(layout, row, block_size, window)
    return [set((start + slot.nonzero().flatten()).tolist()) for slot in seen]


def keys_defined(prefix: int, block_size: int, window: int | None, causal: bool) -> list[set[int]]:
    """The same by the reference drafter's definition."""
    positions = prefix + torch.arange(block_size)
    context = torch.arange(prefix)
    seen = visibility(positions[None], context[None], None, window=window, causal=causal)[0]
    keys = torch.cat([context, positions])
    return [set(keys[slot].tolist()) for slot in seen]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 2, 5, 16, 33])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_every_slot_sees_exactly_its_keys(
    block_size: int, window: int | None, causal: bool, page_size: int
) -> None:
    kernel_window = AttentionWindow(-1 if window is None else window - 1, causal)
    layout = paged_layout(PREFIXES, block_size, kernel_window, page_size)
    for row, prefix in enumerate(PREFIXES.tolist()):
        expected = keys_defined(prefix, block_size, window, causal)
        assert keys_seen(layout, row, block_size, kernel_window) == expected


@pytest.mark.parametrize("causal", [False, True])
def test_one_window_for_the_whole_block_is_not_enough(causal: bool) -> None:
    # What is read begins at the first slot's window; without a window of its own, a later slot
    # sees more. A check that only looks at what is read would not notice.
    layout = paged_layout(PREFIXES, 4, AttentionWindow(4, causal))
    row = len(PREFIXES) - 1
    expected = keys_defined(100, 4, 5, causal)
    got = keys_seen(layout, row, 4, AttentionWindow(-1, causal))
    assert got[0] == expected[0]
    assert got[3] > expected[3]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("window_left", [-1, 0, 20])
def test_the_layout_is_consistent(window_left: int, page_size: int) -> None:
    layout = paged_layout(PREFIXES, 16, AttentionWindow(window_left, False), page_size)
    assert {tensor.dtype for tensor in layout} == {torch.int32}
    pages = layout.kv_indptr.diff()
    assert torch.equal(
        (pages - 1) * page_size + layout.last_page_lens, layout.kv_lens
    )  # as FlashInfer computes lengths
    assert ((layout.last_page_lens >= 1) & (layout.last_page_lens <= page_size)).all()
    assert torch.equal(layout.starts + layout.kv_lens, PREFIXES.int() + 16)
    assert (layout.starts % page_size == 0).all()
    if window_left >= 0:  # no whole page is read in vain
        assert (PREFIXES - layout.starts < window_left + page_size).all()
    assert torch.equal(layout.qo_indptr, torch.arange(len(PREFIXES) + 1, dtype=torch.int32) * 16)


def test_no_requests() -> None:
    layout = paged_layout(torch.zeros(0, dtype=torch.int64), 16, AttentionWindow(-1, False))
    assert layout.kv_indptr.tolist() == [0]
