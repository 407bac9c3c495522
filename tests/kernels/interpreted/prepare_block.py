"""`prepare_block`: Triton against the reference."""

import pytest
import torch
from dflash_kernels.case import Case, Inputs
from dflash_kernels.prepare_block import cases, kernel, reference
from dflash_kernels.types import Block
from torch.library import opcheck

from tests.support.kernel_cases import assert_equal, run_case


@pytest.mark.parametrize("case", [*cases.GRID, *cases.CASES], ids=lambda case: case.name)
def test_kernel_equals_reference(case: Case) -> None:
    assert_equal(run_case("prepare_block", case))


@pytest.mark.parametrize("width", [1, 2, 7, 15])
@pytest.mark.parametrize("bs", [0, 1, 5])
def test_narrow(bs: int, width: int) -> None:
    block = Block(*(torch.randint(0, 10**12, (bs, 16)) for _ in Block._fields))
    got, expected = kernel.narrow_block(block, width), reference.narrow_block(block, width)
    assert all(map(torch.equal, got, expected))
    assert all(columns.is_contiguous() for columns in got)


def test_as_custom_ops() -> None:
    # The ops behind the public functions: argument order, and fakes with the real shapes.
    checks = ("test_schema", "test_faketensor")
    given = cases.layout(Inputs("cpu", 1), 2, 4)
    prepare, narrow = torch.ops.dflash.prepare_block.default, torch.ops.dflash.narrow_block.default
    opcheck(prepare, (*given, 4, 7), test_utils=checks)
    block = reference.prepare_block(*given, block_size=4, mask_token_id=7)
    assert all(map(torch.equal, prepare(*given, 4, 7), block))
    opcheck(narrow, (*block, 2), test_utils=checks)
    assert all(map(torch.equal, narrow(*block, 2), reference.narrow_block(block, 2)))
