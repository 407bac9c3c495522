"""The seeded hash: another hash would sample other tokens than a GPU server with the same seed."""

import pytest
import torch
from dflash_kernels.accept_sampled.hashing import murmur_hash32


def murmur3_of_bytes(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0, word by word in Python's integers."""
    mask, h = 0xFFFFFFFF, 0
    for i in range(0, len(data), 4):
        k = int.from_bytes(data[i : i + 4], "little") * 0xCC9E2D51 & mask
        k = ((k << 15 | k >> 17) & mask) * 0x1B873593 & mask
        h ^= k
        h = ((h << 13 | h >> 19) & mask) * 5 + 0xE6546B64 & mask
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B & mask
    h = (h ^ h >> 13) * 0xC2B2AE35 & mask
    return h ^ h >> 16


def test_the_reference_is_murmur3() -> None:
    # Published vectors of MurmurHash3_x86_32 with seed 0.
    assert murmur3_of_bytes(b"") == 0
    assert murmur3_of_bytes(b"\xff\xff\xff\xff") == 0x76293B50
    assert murmur3_of_bytes(b"\x21\x43\x65\x87") == 0xF55B516B


@pytest.mark.parametrize("seed", [0, 1, 42, 2**31, 2**32 + 7, 2**63 - 1])
def test_matches_murmur3_of_seed_position_and_column(seed: int) -> None:
    positions, columns = [0, 5, 2**20], [0, 1, 1023, 248_319]
    got = murmur_hash32(
        torch.full((3,), seed, dtype=torch.int64), torch.tensor(positions), torch.tensor(columns)
    )
    assert got.dtype == torch.uint32
    for i, position in enumerate(positions):
        for j, column in enumerate(columns):
            words = seed.to_bytes(8, "little") + position.to_bytes(4, "little")
            assert int(got[i, j]) == murmur3_of_bytes(words + column.to_bytes(4, "little"))


def test_takes_the_unsigned_seeds_the_sampler_hands_over() -> None:
    seed = torch.tensor([7], dtype=torch.int64).to(torch.uint64)
    signed = murmur_hash32(torch.tensor([7]), torch.tensor([3]), torch.arange(9))
    assert torch.equal(murmur_hash32(seed, torch.tensor([3]), torch.arange(9)), signed)
