"""The torch look-ups into req_to_token against loops over requests."""

from __future__ import annotations

import torch

from dflash_sglang.cpu.attention.slots import assign_slots, block_slots


def test_assign_writes_each_request_its_own_run_and_nothing_else() -> None:
    """Lengths differ, one is zero, rows are out of order, lengths come as int32 and int64."""
    table = torch.full((6, 40), -1, dtype=torch.int32)
    rows = torch.tensor([4, 0, 3, 1])
    start = torch.tensor([5, 0, 7, 30], dtype=torch.int32)
    end = torch.tensor([8, 10, 7, 31])
    slots = torch.arange(100, 114)
    expected = table.clone()
    taken = 0
    for row, first, last in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
        expected[row, first:last] = slots[taken : taken + last - first].int()
        taken += last - first
    assign_slots(rows, table, start, end, slots, batch_size=4)
    assert torch.equal(table, expected)


def test_assign_ignores_entries_past_the_batch() -> None:
    table = torch.zeros(3, 8, dtype=torch.int32)
    assign_slots(
        torch.tensor([1, 2]), table, torch.tensor([0, 0]), torch.tensor([2, 8]),
        torch.tensor([5, 6]), batch_size=1,
    )  # fmt: skip
    assert table.tolist() == [[0] * 8, [5, 6, 0, 0, 0, 0, 0, 0], [0] * 8]


def test_block_slots() -> None:
    table = torch.arange(60, dtype=torch.int32).view(6, 10)
    slots = block_slots(
        req_pool_indices=torch.tensor([5, 2]),
        req_to_token=table,
        start_offset=torch.tensor([0, 6], dtype=torch.int32),
        end_offset=torch.tensor([3, 9], dtype=torch.int32),
        batch_size=2,
        draft_token_num=3,
        device="cpu",
    )
    assert slots.tolist() == [50, 51, 52, 26, 27, 28]
    assert slots.dtype == torch.int64
