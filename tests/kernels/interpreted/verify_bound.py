"""`verify_bound`: Triton against the reference."""

import pytest
import torch
from dflash_kernels.case import Case, Inputs
from dflash_kernels.verify_bound import cases, reference
from torch.library import opcheck

from tests.support.kernel_cases import assert_equal, run_case


@pytest.mark.parametrize("case", [*cases.GRID, *cases.CASES], ids=lambda case: case.name)
def test_kernel_equals_reference(case: Case) -> None:
    assert_equal(run_case("verify_bound", case))


def test_as_a_custom_op() -> None:
    # The op behind the public function: argument order, and a fake with the real shapes.
    given = cases.given_for(Inputs("cpu", 1), [10, 3, 9], [0.0, 0.1, 0.2, 0.3])
    op = torch.ops.dflash.verify_bound.default
    opcheck(op, given, test_utils=("test_schema", "test_faketensor"))
    assert torch.equal(op(*given), reference.verify_bound(*given))
