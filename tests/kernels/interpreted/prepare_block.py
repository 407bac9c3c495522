"""`prepare_block`: Triton against the reference."""

import pytest
import torch
from dflash_kernels.case import Case, Inputs
from dflash_kernels.prepare_block import cases, reference
from torch.library import opcheck

from tests.support.kernel_cases import assert_equal, run_case


@pytest.mark.parametrize("case", [*cases.GRID, *cases.CASES], ids=lambda case: case.name)
def test_kernel_equals_reference(case: Case) -> None:
    assert_equal(run_case("prepare_block", case))


def test_as_a_custom_op() -> None:
    # The op behind the public function: argument order, and a fake with the real shapes.
    given = cases.layout(Inputs("cpu", 1), 2, 4)
    op = torch.ops.dflash.prepare_block.default
    opcheck(op, (*given, 4, 7), test_utils=("test_schema", "test_faketensor"))
    expected = reference.prepare_block(*given, block_size=4, mask_token_id=7)
    assert all(map(torch.equal, op(*given, 4, 7), expected))
