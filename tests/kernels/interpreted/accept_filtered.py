"""`accept_filtered`: Triton against the reference, draw for draw."""

import pytest
import torch
from dflash_kernels.accept_filtered import cases, kernel, reference
from dflash_kernels.case import Case, Inputs
from dflash_kernels.types import Acceptance
from torch import Tensor
from torch.library import opcheck

from tests.support.kernel_cases import Results, assert_equal, run_case
from tests.support.memory_traffic import bytes_moved


@pytest.mark.parametrize("case", [*cases.GRID, *cases.CASES], ids=lambda case: case.name)
def test_kernel_equals_reference(case: Case) -> None:
    assert_equal(run_case("accept_filtered", case))


def requests(bs: int, width: int, columns: int, *chosen: tuple[int, float, float]) -> cases.Given:
    return cases.requests(Inputs("cpu", columns), bs, width, columns, *chosen)


def compare(given: cases.Given) -> Acceptance:
    got = kernel.accept_filtered(*given)
    assert_equal(Results(got, reference.accept_filtered(*given)))
    return got


def test_rows_with_more_tokens_than_fit_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # Some rows of the batch fit, others do not.
    monkeypatch.setattr(kernel, "CAPACITY", 64)
    compare(requests(7, 1, 5000))


def test_each_filter_of_rows_that_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # 100 tokens stand out, more than fit; of the others, a quarter of the mass, each filter drops.
    monkeypatch.setattr(kernel, "CAPACITY", 64)
    given = requests(3, 6, 5000, (100, 1.0, 0.0), (cases.ALL, 0.7, 0.0), (cases.ALL, 1.0, 0.05))
    logits = 0.3 * torch.randn(18, 5000, generator=torch.Generator().manual_seed(1))
    logits[:, ::50] += 5.0
    got = compare(given._replace(logits=logits, temperatures=torch.ones(3)))
    assert (got.output_ids % 50 == 0).all()


def zipf(columns: int, clustered: bool) -> Tensor:
    """Two rows with probabilities of rank**-1.5 at temperature 1, [2, columns] bfloat16."""
    values = -1.5 * torch.arange(1, columns + 1).log()
    scattered = torch.randperm(columns, generator=torch.Generator().manual_seed(3))
    return (values if clustered else values[scattered]).repeat(2, 1).to(torch.bfloat16)


@pytest.mark.parametrize("clustered", [False, True])
@pytest.mark.parametrize("top_p", [0.8, 0.95])
def test_of_a_text_like_row_few_tokens_are_gathered(top_p: float, clustered: bool) -> None:
    """Scattered or side by side: it fits, and the logits are read twice at most."""
    given = requests(1, 2, 40_000, (cases.ALL, top_p, 0.0))
    given = given._replace(logits=zipf(40_000, clustered), temperatures=torch.ones(1))
    floor = given.logits.numel() * 2
    moved = bytes_moved(lambda: kernel.accept_filtered(*given))
    # For 8 kB a tile of logits 256 bytes of maxima and sums, written and read; and as much for the
    # tokens that are gathered as fits. A row that does not fit would be read 33 times more.
    gathered = 2 * 16 * kernel.CAPACITY
    assert floor < moved < (1.2 if clustered else 2.15) * floor + gathered
    compare(given)


@pytest.mark.parametrize("top_k", [1, 20, 200])
def test_of_any_row_few_tokens_are_gathered_by_top_k(top_k: int) -> None:
    given = requests(1, 2, 40_000, (top_k, 1.0, 0.0))
    floor = given.logits.numel() * 2
    assert floor < bytes_moved(lambda: kernel.accept_filtered(*given)) < 2.2 * floor


def test_a_request_without_filters_has_its_logits_read_once() -> None:
    given = requests(1, 2, 40_000, (cases.ALL, 1.0, 0.0))
    floor = given.logits.numel() * 2
    assert floor < bytes_moved(lambda: kernel.accept_filtered(*given)) < 1.1 * floor


def test_as_a_custom_op() -> None:
    # The op behind the public function: argument order, and a fake with the real shapes.
    given, limit = requests(7, 3, 200), torch.tensor([0, 1, 3, 0, 1, 2, 2]).int()
    arguments = (*given[:5], *given.filters, limit)
    op = torch.ops.dflash.accept_filtered.default
    opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))
    expected = reference.accept_filtered(*given, limit=limit)
    assert all(map(torch.equal, op(*arguments), expected))
