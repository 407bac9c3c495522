"""`accept_match`: Triton against the reference."""

import pytest
import torch
from dflash_kernels.accept_match import cases, kernel, reference
from dflash_kernels.case import Case, Inputs
from torch.library import opcheck

from tests.support.kernel_cases import assert_equal, run_case


@pytest.mark.parametrize("case", [*cases.GRID, *cases.CASES], ids=lambda case: case.name)
def test_kernel_equals_reference(case: Case) -> None:
    assert_equal(run_case("accept_match", case))


def test_without_exceptions_nothing_is_copied() -> None:
    given = cases.blocks(Inputs("cpu", 1), 3, 4)
    assert kernel.accept_match(*given).output_ids is given[1]


@pytest.mark.parametrize("options", [False, True])
def test_as_a_custom_op(options: bool) -> None:
    # The op behind the public function: argument order, and a fake with the real shapes.
    given = cases.blocks(Inputs("cpu", 1), 5, 4)
    limit = torch.tensor([0, 1, 2, 3, 3], dtype=torch.int32) if options else None
    extra_accept = torch.rand(5, 3) < 0.5 if options else None
    op = torch.ops.dflash.accept_match.default
    opcheck(op, (*given, limit, extra_accept), test_utils=("test_schema", "test_faketensor"))
    got = op(*given, limit, extra_accept)
    expected = reference.accept_match(*given, limit=limit, extra_accept=extra_accept)
    if not options:
        expected = expected._replace(output_ids=torch.empty(0, dtype=torch.int64))
    assert all(map(torch.equal, got, expected))
