"""`accept_sampled`: Triton against the reference, draw for draw."""

import pytest
import torch
import triton
import triton.language as tl
from dflash_kernels import triton_common
from dflash_kernels.accept_sampled import cases, kernel, reference
from dflash_kernels.accept_sampled.hashing import gumbel, murmur_hash32
from dflash_kernels.case import Case, Inputs
from torch.library import opcheck

from tests.support.kernel_cases import assert_equal, run_case
from tests.support.memory_traffic import bytes_moved


@pytest.mark.parametrize("case", [*cases.GRID, *cases.CASES], ids=lambda case: case.name)
def test_kernel_equals_reference(case: Case) -> None:
    assert_equal(run_case("accept_sampled", case))


@triton.jit
def _noise(  # type: ignore[no-untyped-def]
    hash_ptr, seed_ptr, position_ptr, out32_ptr, out64_ptr, hashed_ptr, COUNT: tl.constexpr
):
    i = tl.arange(0, COUNT)
    hashed = tl.load(hash_ptr + i).to(tl.uint32)
    tl.store(out32_ptr + i, triton_common.gumbel32(hashed))
    tl.store(out64_ptr + i, triton_common.gumbel64(hashed))
    row_hash = triton_common.hash_of_row(tl.load(seed_ptr), tl.load(position_ptr))
    tl.store(hashed_ptr + i, triton_common.hash_of(row_hash, i).to(tl.int64))


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
    given = cases.requests(Inputs("cpu", 1), 1, 4, 40_000)
    floor = given.logits.numel() * 2
    moved = bytes_moved(lambda: kernel.accept_sampled(*given))
    # 12 bytes written and read for a tile of 8 kB, and a few numbers each program loads.
    assert floor < moved < 1.01 * floor


def test_as_a_custom_op() -> None:
    # The op behind the public function: argument order, and a fake with the real shapes.
    given = cases.requests(Inputs("cpu", 1), 3, 4, 200)
    limit = torch.tensor([0, 1, 3], dtype=torch.int32)
    op = torch.ops.dflash.accept_sampled.default
    opcheck(op, (*given, limit), test_utils=("test_schema", "test_faketensor"))
    expected = reference.accept_sampled(*given, limit=limit)
    assert all(map(torch.equal, op(*given, limit), expected))
