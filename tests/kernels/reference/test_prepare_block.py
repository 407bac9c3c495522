"""The draft block's layout: off by one, it shifts every draft or writes a stranger's slot."""

import pytest
import torch
from dflash_kernels.prepare_block import prepare_block


@pytest.mark.parametrize("block_size", [1, 2, 5, 16])
@pytest.mark.parametrize("bs", [1, 3, 63])
def test_layout_matches_a_loop_over_positions(bs: int, block_size: int) -> None:
    generator = torch.Generator().manual_seed(bs * 100 + block_size)
    width = 200
    req_to_token = torch.randperm(70 * width, generator=generator).view(70, width).to(torch.int32)
    rows = torch.randperm(70, generator=generator)[:bs]
    prefix_lens = torch.randint(0, width - block_size + 1, (bs,), generator=generator)
    anchors = torch.randint(0, 1000, (bs,), generator=generator)

    block = prepare_block(
        anchors, prefix_lens, rows, req_to_token, block_size=block_size, mask_token_id=999
    )

    for i in range(bs):
        for j in range(block_size):
            assert block.ids[i, j] == (anchors[i] if j == 0 else 999)
            assert block.positions[i, j] == prefix_lens[i] + j
            assert block.slots[i, j] == req_to_token[rows[i], prefix_lens[i] + j]
    assert {t.dtype for t in block} == {torch.int64}


def test_the_mask_token_as_anchor_stays_an_anchor() -> None:
    # A verifier may emit the mask token itself: the block must still start with it.
    block = prepare_block(
        torch.tensor([7]),
        torch.tensor([0]),
        torch.tensor([0]),
        torch.arange(8, dtype=torch.int32)[None],
        block_size=4,
        mask_token_id=7,
    )
    assert block.ids.tolist() == [[7, 7, 7, 7]]


def test_an_empty_batch_gives_an_empty_block() -> None:
    none = torch.empty(0, dtype=torch.int64)
    block = prepare_block(
        none, none, none, torch.zeros(1, 8, dtype=torch.int32), block_size=4, mask_token_id=1
    )
    assert block.slots.shape == (0, 4)
