"""The drafter's window: the right slots, from the right start, at every page size."""

from types import SimpleNamespace

import pytest
import torch

from dflash_sglang.step.draft.window import DraftWindow

BLOCK = 4


@pytest.mark.parametrize("mirrored", [True, False])
@pytest.mark.parametrize("block", [2, BLOCK])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("window", [4, 10, 32])
def test_rows_hold_the_recent_slots_then_the_block(
    window: int, page_size: int, mirrored: bool, block: int
) -> None:
    width = 128
    target = SimpleNamespace(req_to_token=torch.arange(6 * width, dtype=torch.int32).view(6, width))
    draft = SimpleNamespace(req_to_token=torch.full((6, width), -1, dtype=torch.int32))
    prefix = torch.tensor([0, 1, window, window + 1, 100])
    rows = torch.tensor([5, 0, 2, 4, 1])
    mirror = prefix if mirrored else None
    batch = SimpleNamespace(seq_lens=prefix, seq_lens_cpu=mirror, req_pool_indices=rows)

    rebuilder = DraftWindow(window, page_size, BLOCK)
    rebuilder.bind(target, draft)
    bound = (prefix + block).to(torch.int32)
    visible, visible_bound = rebuilder.rebuild(batch, bound, block)

    for i, (row, length) in enumerate(zip(rows.tolist(), prefix.tolist(), strict=True)):
        start = length - int(visible[i])
        assert start % page_size == 0  # paged backends read whole pages
        assert min(length, window) <= visible[i] < min(length, window) + page_size
        expected = target.req_to_token[row, start : length + block].tolist()
        assert draft.req_to_token[row, : int(visible[i]) + block].tolist() == expected
        assert visible_bound[i] >= visible[i] + block
    if mirrored:  # then attention may be planned from it
        assert torch.equal(visible_bound, (visible + block).to(torch.int32))
    assert (draft.req_to_token[3] == -1).all()  # another request's row


def test_a_request_at_the_end_of_the_table_stays_inside_it() -> None:
    width = 24
    target = SimpleNamespace(req_to_token=torch.arange(width, dtype=torch.int32)[None])
    draft = SimpleNamespace(req_to_token=torch.zeros(1, width, dtype=torch.int32))
    batch = SimpleNamespace(
        seq_lens=torch.tensor([20]),
        seq_lens_cpu=torch.tensor([20]),
        req_pool_indices=torch.tensor([0]),
    )
    rebuilder = DraftWindow(8, 1, BLOCK)
    rebuilder.bind(target, draft)
    visible, _ = rebuilder.rebuild(batch, torch.tensor([24], dtype=torch.int32), BLOCK)
    assert draft.req_to_token[0, : int(visible[0]) + BLOCK].tolist() == list(range(12, 24))
