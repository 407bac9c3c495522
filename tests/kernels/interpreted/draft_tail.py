"""`draft_tail`: Triton against the reference."""

import pytest
import torch
from dflash_kernels.draft_tail import kernel, reference
from dflash_kernels.types import Tail
from torch import Tensor
from torch.library import opcheck

from tests.support.memory_traffic import bytes_moved

# Both sums are float32 over the same terms in another order; 5,000 terms, 2**-24 each.
LSE_TOLERANCE = 2e-5


def assert_equal(got: Tail, expected: Tail) -> None:
    assert torch.equal(got.ids, expected.ids)
    assert torch.equal(got.values, expected.values)
    torch.testing.assert_close(got.lse, expected.lse, rtol=1e-6, atol=LSE_TOLERANCE)


def compare(logits: Tensor, num_ids: int, top: int) -> Tail:
    got = Tail(*kernel.draft_tail(logits, num_ids=num_ids, top=top))
    assert_equal(got, reference.draft_tail(logits, num_ids=num_ids, top=top))
    return got


def noise(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(rows * columns)
    return (4 * torch.randn(rows, columns, generator=generator)).to(dtype)


@pytest.mark.parametrize("top", [1, 5, 32])
@pytest.mark.parametrize("columns", [32, 1000, 4095, 4096, 4097, 5000])
def test_odd_sizes(columns: int, top: int) -> None:
    # bfloat16 noise repeats values within a row: the order of ties is tested as well.
    compare(noise(3, columns), columns, top)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    compare(noise(2, 777, dtype), 777, 3)


@pytest.mark.parametrize("top", [1, 4])
def test_padding_is_never_chosen(top: int) -> None:
    logits = noise(3, 5000)
    logits[:, 4500:] = 100.0
    assert compare(logits, 4500, top).ids.max() < 4500


@pytest.mark.parametrize("top", [1, 32])
def test_ties_within_and_between_tiles_go_to_the_smallest_id(top: int) -> None:
    # Every logit is one of three values; the largest occurs in both tiles.
    generator = torch.Generator().manual_seed(4)
    logits = torch.randint(0, 3, (4, 5000), generator=generator).to(torch.bfloat16)
    logits[3] = 0.0
    got = compare(logits, 5000, top)
    assert got.ids[3].tolist() == list(range(top))


def test_signs_zeros_nans_and_rows_without_a_finite_logit() -> None:
    logits = torch.full((6, 40), -torch.inf)
    logits[0, 7] = -3.0  # all finite values negative
    logits[0, 9] = -2.0
    logits[1, 5], logits[1, 6] = 0.0, -0.0  # equal
    logits[2, 5], logits[2, 6] = -0.0, 0.0
    logits[3, 3], logits[3, 4] = torch.nan, -1.0
    logits[4] = torch.nan
    got = compare(logits, 40, 2)
    assert got.ids[:, 0].tolist() == [9, 5, 5, 4, 0, 0]
    assert got.lse[4:].tolist() == [-torch.inf] * 2


def test_no_rows() -> None:
    assert kernel.draft_tail(noise(0, 64), num_ids=64)[0].shape == (0, 1)


def test_a_peaked_row_far_from_zero_does_not_overflow() -> None:
    logits = noise(2, 4100, torch.float32) + 500.0
    logits[1, 4099] = 900.0
    assert compare(logits, 4100, 1).probs[1].item() == 1.0


@pytest.mark.parametrize("columns", [151_936, 248_320])
def test_full_vocabulary(columns: int) -> None:
    compare(noise(1, columns), columns, 2)


def test_rows_may_lie_further_apart_than_int32_reaches() -> None:
    stride = 1 << 30
    memory = torch.empty(0, dtype=torch.bfloat16).set_(
        torch.UntypedStorage(2 * (2 * stride + 64)), 0, (3, 64), (stride, 1)
    )
    memory.copy_(noise(3, 64))
    compare(memory, 64, 2)


def test_reads_the_logits_once() -> None:
    logits = noise(4, 40_000)
    floor = logits.numel() * 2
    moved = bytes_moved(lambda: kernel.draft_tail(logits, num_ids=40_000))
    # 12 bytes written and at most 20 read again for a tile of 8 kB.
    assert floor < moved < 1.01 * floor


def test_as_a_custom_op() -> None:
    # The op behind the public function: argument order, and a fake that tells the truth.
    logits, op = noise(3, 500), torch.ops.dflash.draft_tail.default
    opcheck(op, (logits, 400, 3), test_utils=("test_schema", "test_faketensor"))
    assert_equal(Tail(*op(logits, 400, 3)), reference.draft_tail(logits, num_ids=400, top=3))
