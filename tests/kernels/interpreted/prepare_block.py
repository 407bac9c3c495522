"""`prepare_block` and `narrow_block`: Triton against the reference."""

import pytest
import torch
from dflash_kernels.prepare_block import kernel, reference
from dflash_kernels.types import Block
from torch.library import opcheck


@pytest.mark.parametrize("block_size", [1, 2, 5, 16, 17])
@pytest.mark.parametrize("bs", [0, 1, 3, 63])
def test_layout(bs: int, block_size: int) -> None:
    generator = torch.Generator().manual_seed(bs * 100 + block_size)
    width = 200
    table = torch.randperm(70 * width, generator=generator).view(70, width).to(torch.int32)
    rows = torch.randperm(70, generator=generator)[:bs]
    # The longest prefix reaches the table's last column.
    prefix_lens = torch.randint(0, width - block_size + 1, (bs,), generator=generator)
    prefix_lens[:1] = width - block_size
    anchors = torch.randint(0, 1000, (bs,), generator=generator)
    sizes = {"block_size": block_size, "mask_token_id": 999}

    got = kernel.prepare_block(anchors, prefix_lens, rows, table, **sizes)

    expected = reference.prepare_block(anchors, prefix_lens, rows, table, **sizes)
    for name, ours, theirs in zip(Block._fields, got, expected, strict=True):
        assert torch.equal(ours, theirs), name


def test_inputs_may_be_columns_of_other_tensors() -> None:
    # The scheduler hands over slices: adjacent elements of a column lie apart.
    state = torch.tensor([[11, 3, 1], [12, 0, 0], [13, 7, 2]])
    anchors, prefix_lens, rows = state.unbind(1)
    table = torch.arange(60, dtype=torch.int32).view(3, 20)[:, :16]
    sizes = {"block_size": 4, "mask_token_id": 5}
    got = kernel.prepare_block(anchors, prefix_lens, rows, table, **sizes)
    expected = reference.prepare_block(anchors, prefix_lens, rows, table, **sizes)
    assert all(map(torch.equal, got, expected))


def test_the_table_may_be_larger_than_int32_reaches() -> None:
    # Rows of 2**30 columns; pages that nobody touches take no memory.
    stride = 1 << 30
    storage = torch.UntypedStorage(4 * (2 * stride + 8))
    memory = torch.empty(0, dtype=torch.int32).set_(storage, 0, (3, 8), (stride, 1))
    memory[2, 4:8] = torch.arange(40, 44, dtype=torch.int32)
    got = kernel.prepare_block(
        torch.tensor([9]),
        torch.tensor([4]),
        torch.tensor([2]),
        memory,
        block_size=4,
        mask_token_id=1,
    )
    assert got.slots.tolist() == [[40, 41, 42, 43]]


@pytest.mark.parametrize("width", [1, 2, 7, 15])
@pytest.mark.parametrize("bs", [0, 1, 5])
def test_narrow(bs: int, width: int) -> None:
    block = Block(*(torch.randint(0, 10**12, (bs, 16)) for _ in Block._fields))
    got, expected = kernel.narrow_block(block, width), reference.narrow_block(block, width)
    assert all(map(torch.equal, got, expected))
    assert all(columns.is_contiguous() for columns in got)


def test_as_custom_ops() -> None:
    # The ops behind the public functions: argument order, and fakes that tell the truth.
    checks = ("test_schema", "test_faketensor")
    table = torch.arange(60, dtype=torch.int32).view(3, 20)
    given = torch.tensor([11, 12]), torch.tensor([3, 0]), torch.tensor([2, 0]), table
    prepare, narrow = torch.ops.dflash.prepare_block.default, torch.ops.dflash.narrow_block.default
    opcheck(prepare, (*given, 4, 7), test_utils=checks)
    block = reference.prepare_block(*given, block_size=4, mask_token_id=7)
    assert all(map(torch.equal, prepare(*given, 4, 7), block))
    opcheck(narrow, (*block, 2), test_utils=checks)
    assert all(map(torch.equal, narrow(*block, 2), reference.narrow_block(block, 2)))
