"""`accept_sampled`: Triton against the reference, draw for draw."""

import pytest
import torch
import triton
import triton.language as tl
from dflash_kernels.accept_sampled import kernel, reference
from dflash_kernels.accept_sampled.hashing import gumbel, murmur_hash32
from dflash_kernels.types import Acceptance
from torch import Tensor
from torch.library import opcheck

from tests.support.memory_traffic import bytes_moved


def compare(*given: Tensor, limit: Tensor | None = None) -> Acceptance:
    """The kernel decides in float64 with the reference's formula: every draw must be the same."""
    got = kernel.accept_sampled(*given, limit=limit)
    expected = reference.accept_sampled(*given, limit=limit)
    for name, ours, theirs in zip(Acceptance._fields, got, expected, strict=True):
        assert ours.dtype == theirs.dtype, name
        assert torch.equal(ours, theirs), name
    return got


def requests(
    bs: int, width: int, columns: int, scale: float = 2.0, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Random logits; drafts are what will be drawn, but for about one column in five."""
    generator = torch.Generator().manual_seed(bs * 1009 + width * 31 + columns)
    logits = (scale * torch.randn(bs * width, columns, generator=generator)).to(dtype)
    prefix_lens = torch.randint(0, 2**33, (bs,), generator=generator)
    temperatures = 0.3 + torch.rand(bs, generator=generator)
    seeds = torch.randint(-(2**63), 2**63 - 1, (bs,), generator=generator)
    draft_ids = torch.randint(0, columns, (bs, width), generator=generator)
    drawn = reference.accept_sampled(logits, draft_ids, prefix_lens, temperatures, seeds).output_ids
    keep = torch.rand(bs, width - 1, generator=generator) < 0.2
    draft_ids[:, 1:] = torch.where(keep, draft_ids[:, 1:], drawn[:, :-1])
    return logits, draft_ids, prefix_lens, temperatures, seeds


@pytest.mark.parametrize("columns", [1, 50, 4095, 4097, 5000])
@pytest.mark.parametrize(("bs", "width"), [(1, 1), (3, 5), (2, 16)])
def test_odd_sizes(bs: int, width: int, columns: int) -> None:
    compare(*requests(bs, width, columns))


def test_many_short_rows() -> None:
    got = compare(*requests(21, 4, 300))
    assert set(got.accept_len.tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    compare(*requests(2, 3, 700, dtype=dtype))


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1e3])
def test_flat_and_extreme_logits(scale: float) -> None:
    # Flat: noise alone decides, near ties are frequent. Extreme: float32 sees 1e-4 of a score.
    compare(*requests(8, 4, 3000, scale=scale))


def test_near_ties_are_decided_in_float64() -> None:
    """Logits that undo the noise: all 300 scores of a row agree to a float32's last bits."""
    rows, columns = 6, 300
    prefix_lens, seeds = torch.arange(rows) * 10, torch.arange(rows) + 5
    noise = gumbel(murmur_hash32(seeds, prefix_lens, torch.arange(columns)))
    logits = (20.0 - noise).to(torch.float32)
    draft_ids = torch.zeros(rows, 1, dtype=torch.int64)
    compare(logits, draft_ids, prefix_lens, torch.ones(rows), seeds)


def test_greedy_rows_beside_drawn_ones() -> None:
    logits, draft_ids, prefix_lens, temperatures, seeds = requests(4, 3, 4500)
    temperatures[[1, 3]] = 0.0
    logits[9:] = 1.0  # ties in both tiles: the smallest id
    got = compare(logits, draft_ids, prefix_lens, temperatures, seeds)
    assert torch.equal(got.output_ids[1], logits[3:6].float().argmax(1))
    assert got.output_ids[3].tolist() == [0, 0, 0]


def test_masked_logits_are_never_drawn() -> None:
    # A grammar leaves few ids, none in the first tile; one row has nothing left at all.
    logits, draft_ids, prefix_lens, temperatures, seeds = requests(2, 3, 5000)
    allowed = torch.tensor([4100, 4101, 4999])
    masked = torch.full_like(logits, -torch.inf)
    masked[:, allowed] = logits[:, allowed]
    masked[0, 7] = torch.nan
    masked[5] = -torch.inf
    got = compare(masked, draft_ids, prefix_lens, temperatures, seeds)
    assert torch.isin(got.output_ids.flatten()[:5], allowed).all()
    assert got.output_ids[1, 2] == 0


def test_limit() -> None:
    given = requests(18, 4, 64)
    compare(*given, limit=(torch.arange(18) % 6 - 1).to(torch.int32))


def test_no_requests() -> None:
    none = torch.zeros(0)
    got = kernel.accept_sampled(
        torch.zeros(0, 9), torch.zeros(0, 4, dtype=torch.int64), none.long(), none, none.long()
    )
    assert got.output_ids.shape == (0, 4)


def test_logits_may_be_the_valid_columns_of_a_padded_matrix() -> None:
    logits, *rest = requests(2, 3, 640)
    padded = torch.full((6, 700), 99.0, dtype=logits.dtype)
    padded[:, :640] = logits
    compare(padded[:, :640], *rest)


@pytest.mark.parametrize("columns", [151_936, 248_320])
def test_full_vocabulary(columns: int) -> None:
    compare(*requests(1, 2, columns))


def test_rows_may_lie_further_apart_than_int32_reaches() -> None:
    logits, *rest = requests(1, 3, 64)
    stride = 1 << 30
    memory = torch.empty(0, dtype=torch.bfloat16).set_(
        torch.UntypedStorage(2 * (2 * stride + 64)), 0, (3, 64), (stride, 1)
    )
    memory.copy_(logits)
    compare(memory, *rest)


@triton.jit
def _noise(hash_ptr, seed_ptr, position_ptr, out32_ptr, out64_ptr, hashed_ptr, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    hashed = tl.load(hash_ptr + i).to(tl.uint32)
    tl.store(out32_ptr + i, kernel.gumbel32(hashed))
    tl.store(out64_ptr + i, kernel.gumbel64(hashed))
    row_hash = kernel.hash_of_row(tl.load(seed_ptr), tl.load(position_ptr))
    tl.store(hashed_ptr + i, kernel.hash_of(row_hash, i).to(tl.int64))


def test_hash_and_noise_at_the_ends_and_between() -> None:
    edges = [0, 1, 2, 2**31 - 1, 2**31, 3 * 2**30 - 1, 3 * 2**30, 2**32 - 2, 2**32 - 1]
    generator = torch.Generator().manual_seed(5)
    hashed = torch.randint(0, 2**32, (4096,), generator=generator)
    hashed[: len(edges)] = torch.tensor(edges)
    hashed[100:132] = 2**32 - 1 - 2 ** torch.arange(32)  # u ever closer to 1
    seed, position = torch.tensor([-(2**40) + 12345]), torch.tensor([2**20 + 7])
    out32, out64, own = torch.empty(4096), torch.empty(4096).double(), torch.empty(4096).long()

    _noise[(1,)](hashed, seed, position, out32, out64, own, COUNT=4096)

    expected = gumbel(hashed.to(torch.uint32))
    # Two float64 logarithms of other libraries: 1e-15 each, relative.
    torch.testing.assert_close(out64, expected, rtol=1e-14, atol=1e-14)
    # The bound that the kernel's slack is built on.
    torch.testing.assert_close(out32.double(), expected, rtol=1e-7, atol=4e-6)
    assert torch.equal(own, murmur_hash32(seed, position, torch.arange(4096))[0].long())


def test_reads_the_logits_once() -> None:
    given = requests(1, 4, 40_000)
    floor = given[0].numel() * 2
    moved = bytes_moved(lambda: kernel.accept_sampled(*given))
    # 12 bytes written and read for a tile of 8 kB, and a few numbers each program loads.
    assert floor < moved < 1.01 * floor


def test_as_a_custom_op() -> None:
    # The op behind the public function: argument order, and a fake that tells the truth.
    given, limit = requests(3, 4, 200), torch.tensor([0, 1, 3], dtype=torch.int32)
    op = torch.ops.dflash.accept_sampled.default
    opcheck(op, (*given, limit), test_utils=("test_schema", "test_faketensor"))
    expected = reference.accept_sampled(*given, limit=limit)
    assert all(map(torch.equal, op(*given, limit), expected))
