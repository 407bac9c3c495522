"""`accept_filtered`: Triton against the reference, draw for draw."""

import pytest
import torch
from dflash_kernels.accept_filtered import kernel, reference
from dflash_kernels.accept_sampled import accept_sampled
from dflash_kernels.types import Acceptance, Filters
from torch import Tensor
from torch.library import opcheck

from tests.support.memory_traffic import bytes_moved

Given = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Filters]


def compare(*given: object, limit: Tensor | None = None) -> Acceptance:
    """Draws are equal; a probability that lies within 1e-7 of a limit could tell them apart."""
    got = kernel.accept_filtered(*given, limit=limit)  # type: ignore[arg-type]
    expected = reference.accept_filtered(*given, limit=limit)  # type: ignore[arg-type]
    for name, ours, theirs in zip(Acceptance._fields, got, expected, strict=True):
        assert ours.dtype == theirs.dtype, name
        assert torch.equal(ours, theirs), name
    return got


def filters(bs: int, top_k: int = 2**30, top_p: float = 1.0, min_p: float = 0.0) -> Filters:
    return Filters(
        torch.full((bs,), top_k, dtype=torch.int32),
        torch.full((bs,), top_p),
        torch.full((bs,), min_p),
    )


def requests(
    bs: int, width: int, columns: int, chosen: Filters, dtype: torch.dtype = torch.bfloat16
) -> Given:
    """Random logits, of which a few stand out; drafts are what will be drawn in most columns."""
    generator = torch.Generator().manual_seed(bs * 1009 + width * 31 + columns)
    logits = torch.randn(bs * width, columns, generator=generator)
    logits[:, torch.randperm(columns, generator=generator)[: columns // 50 + 1]] += 4.0
    logits = logits.to(dtype)
    prefix_lens = torch.randint(0, 2**33, (bs,), generator=generator)
    temperatures = 0.6 + 0.6 * torch.rand(bs, generator=generator)
    seeds = torch.randint(-(2**63), 2**63 - 1, (bs,), generator=generator)
    draft_ids = torch.randint(0, columns, (bs, width), generator=generator)
    given = logits, draft_ids, prefix_lens, temperatures, seeds, chosen
    drawn = reference.accept_filtered(*given).output_ids
    keep = torch.rand(bs, width - 1, generator=generator) < 0.2
    draft_ids[:, 1:] = torch.where(keep, draft_ids[:, 1:], drawn[:, :-1])
    return given


MIXED = Filters(
    torch.tensor([2**30, 20, 2**30, 50, 2**30, 1, 3], dtype=torch.int32),
    torch.tensor([0.9, 1.0, 1.0, 0.95, 1.0, 1.0, 0.3]),
    torch.tensor([0.0, 0.0, 0.1, 0.02, 0.0, 0.0, 0.5]),
)


def some(bs: int) -> Filters:
    return Filters(*(values.repeat(bs // 7 + 1)[:bs] for values in MIXED))


@pytest.mark.parametrize("columns", [1, 50, 4095, 4097, 9000])
@pytest.mark.parametrize(("bs", "width"), [(1, 1), (7, 2)])
def test_odd_sizes_and_mixed_requests(bs: int, width: int, columns: int) -> None:
    compare(*requests(bs, width, columns, some(bs)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    compare(*requests(7, 1, 700, MIXED, dtype))


@pytest.mark.parametrize(
    "chosen",
    [
        {"top_k": 1},
        {"top_k": 40},
        {"top_k": 299},
        {"top_p": 0.01},
        {"top_p": 0.999},
        {"min_p": 1.0},
        {"min_p": 0.001},
        {"top_k": 30, "top_p": 0.8, "min_p": 0.01},
    ],
    ids=str,
)
def test_each_filter(chosen: dict[str, float]) -> None:
    compare(*requests(4, 3, 300, filters(4, **chosen)))  # type: ignore[arg-type]


def test_top_k_keeps_so_many() -> None:
    # Fewer maxima than k, so no bound helps; the next token would be drawn in one row in eight.
    compare(*requests(40, 1, 20, filters(40, top_k=3), torch.float32))


def test_rows_with_more_tokens_than_fit_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # Some rows of the batch fit, others do not.
    monkeypatch.setattr(kernel, "CAPACITY", 64)
    compare(*requests(7, 1, 5000, MIXED))


def test_each_filter_of_rows_that_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # 100 tokens stand out, more than fit; of the others, a quarter of the mass, each filter drops.
    monkeypatch.setattr(kernel, "CAPACITY", 64)
    chosen = Filters(
        torch.tensor([100, 2**30, 2**30], dtype=torch.int32),
        torch.tensor([1.0, 0.7, 1.0]),
        torch.tensor([0.0, 0.0, 0.05]),
    )
    rest = requests(3, 6, 5000, chosen)[1:]
    rest[2][:] = 1.0  # the temperature
    logits = 0.3 * torch.randn(18, 5000, generator=torch.Generator().manual_seed(1))
    logits[:, ::50] += 5.0
    got = compare(logits, *rest)
    assert (got.output_ids % 50 == 0).all()


def test_requests_without_filters_draw_as_alone() -> None:
    given = requests(7, 2, 5000, MIXED)
    given[3][5] = 0.0  # greedy
    got = compare(*given)
    alone = accept_sampled(*given[:5])
    assert torch.equal(got.output_ids[4], alone.output_ids[4])
    assert torch.equal(got.output_ids[5], given[0][10:12].float().argmax(1))


def test_equal_logits_are_kept_or_dropped_together() -> None:
    # Three values; the second starts below the limits, so all of its tokens are kept.
    generator = torch.Generator().manual_seed(4)
    logits = torch.randint(0, 3, (14, 5000), generator=generator).float() * 3
    rest = requests(7, 2, 5000, MIXED)[1:]
    got = compare(logits, *rest)
    assert got.output_ids.unique().numel() > 7


def test_masked_logits_and_rows_without_any() -> None:
    logits, *rest = requests(7, 2, 5000, MIXED)
    masked = torch.full_like(logits, -torch.inf)
    allowed = torch.tensor([7, 4100, 4101, 4999])
    masked[:, allowed] = logits[:, allowed]
    masked[0, 7] = torch.nan
    masked[5] = -torch.inf
    got = compare(masked, *rest)
    assert torch.isin(got.output_ids.flatten(), torch.cat([allowed, torch.tensor([0])])).all()


def test_extreme_logits() -> None:
    logits, *rest = requests(7, 2, 3000, MIXED)
    compare(logits.float() * 300 + 5000, *rest)


def test_limit_and_padding() -> None:
    logits, *rest = requests(7, 2, 640, MIXED)
    padded = torch.full((14, 700), 99.0, dtype=logits.dtype)
    padded[:, :640] = logits
    compare(padded[:, :640], *rest, limit=(torch.arange(7) % 5 - 1).to(torch.int32))


def test_no_requests() -> None:
    none = torch.zeros(0)
    got = kernel.accept_filtered(
        torch.zeros(0, 9),
        torch.zeros(0, 4, dtype=torch.int64),
        none.long(),
        none,
        none.long(),
        filters(0),
    )
    assert got.output_ids.shape == (0, 4)


@pytest.mark.parametrize("columns", [151_936, 248_320])
def test_full_vocabulary(columns: int) -> None:
    compare(*requests(2, 1, columns, some(2)))


def test_rows_may_lie_further_apart_than_int32_reaches() -> None:
    logits, *rest = requests(1, 3, 64, some(1))
    stride = 1 << 30
    memory = torch.empty(0, dtype=torch.bfloat16).set_(
        torch.UntypedStorage(2 * (2 * stride + 64)), 0, (3, 64), (stride, 1)
    )
    memory.copy_(logits)
    compare(memory, *rest)


def zipf(columns: int, clustered: bool) -> Tensor:
    """Two rows with probabilities of rank**-1.5 at temperature 1, [2, columns] bfloat16."""
    values = -1.5 * torch.arange(1, columns + 1).log()
    scattered = torch.randperm(columns, generator=torch.Generator().manual_seed(3))
    return (values if clustered else values[scattered]).repeat(2, 1).to(torch.bfloat16)


@pytest.mark.parametrize("clustered", [False, True])
@pytest.mark.parametrize("top_p", [0.8, 0.95])
def test_of_a_text_like_row_few_tokens_are_gathered(top_p: float, clustered: bool) -> None:
    """Scattered or side by side: it fits, and the logits are read twice at most."""
    logits = zipf(40_000, clustered)
    rest = requests(1, 2, 40_000, filters(1, top_p=top_p))[1:]
    rest[2][:] = 1.0  # the temperature
    floor = logits.numel() * 2
    moved = bytes_moved(lambda: kernel.accept_filtered(logits, *rest))
    # For 8 kB a tile of logits 256 bytes of maxima and sums, written and read; and as much for the
    # tokens that are gathered as fits. A row that does not fit would be read 33 times more.
    gathered = 2 * 16 * kernel.CAPACITY
    assert floor < moved < (1.2 if clustered else 2.15) * floor + gathered
    compare(logits, *rest)


@pytest.mark.parametrize("top_k", [1, 20, 200])
def test_of_any_row_few_tokens_are_gathered_by_top_k(top_k: int) -> None:
    given = requests(1, 2, 40_000, filters(1, top_k=top_k))
    floor = given[0].numel() * 2
    assert floor < bytes_moved(lambda: kernel.accept_filtered(*given)) < 2.2 * floor


def test_a_request_without_filters_has_its_logits_read_once() -> None:
    given = requests(1, 2, 40_000, filters(1))
    floor = given[0].numel() * 2
    assert floor < bytes_moved(lambda: kernel.accept_filtered(*given)) < 1.1 * floor


def test_as_a_custom_op() -> None:
    # The op behind the public function: argument order, and a fake that tells the truth.
    given, limit = requests(7, 3, 200, MIXED), torch.tensor([0, 1, 3, 0, 1, 2, 2]).int()
    arguments = (*given[:5], *given[5], limit)
    op = torch.ops.dflash.accept_filtered.default
    opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))
    expected = reference.accept_filtered(*given, limit=limit)
    assert all(map(torch.equal, op(*arguments), expected))
