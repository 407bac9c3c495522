"""`draft_tail`: Triton against the reference."""

import pytest
import torch
from dflash_kernels.case import Case, Inputs
from dflash_kernels.draft_tail import cases, kernel, reference
from dflash_kernels.types import Tail
from torch.library import opcheck

from tests.support.kernel_cases import run_case
from tests.support.memory_traffic import bytes_moved


def assert_equal(got: Tail, expected: Tail) -> None:
    assert torch.equal(got.ids, expected.ids)
    assert torch.equal(got.values, expected.values)
    # Both sums are float32 over the same terms in another order; 5,000 terms, 2**-24 each.
    torch.testing.assert_close(got.lse, expected.lse, rtol=1e-6, atol=2e-5)


@pytest.mark.parametrize("case", [*cases.GRID, *cases.CASES], ids=lambda case: case.name)
def test_kernel_equals_reference(case: Case) -> None:
    got, expected = run_case("draft_tail", case)
    assert_equal(Tail(*got), Tail(*expected))


def test_reads_the_logits_once() -> None:
    logits = cases.noise(Inputs("cpu", 1), 4, 40_000)
    floor = logits.numel() * 2
    moved = bytes_moved(lambda: kernel.draft_tail(logits, num_ids=40_000))
    # 12 bytes written and at most 20 read again for a tile of 8 kB.
    assert floor < moved < 1.01 * floor


def test_as_a_custom_op() -> None:
    # The op behind the public function: argument order, and a fake with the real shapes.
    logits, op = cases.noise(Inputs("cpu", 1), 3, 500), torch.ops.dflash.draft_tail.default
    opcheck(op, (logits, 400, 3), test_utils=("test_schema", "test_faketensor"))
    assert_equal(Tail(*op(logits, 400, 3)), reference.draft_tail(logits, num_ids=400, top=3))
