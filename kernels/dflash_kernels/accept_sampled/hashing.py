"""The position-keyed hash and the Gumbel noise of SGLang's seeded sampling, in torch."""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def murmur_hash32(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    """MurmurHash3 (32 bit) of (seed, position, column), bit for bit SGLang's.

    Args:
        seed: [n] 64-bit integers, one a request.
        positions: [n] integers, of the token that is sampled from.
        col_indices: [m] integers, token ids.

    Returns:
        [n, m] uint32.

    Source: Appleby's MurmurHash3_x86_32 over the four words seed_low, seed_high, position, column,
    as in sglang/kernels/ops/sampling/murmur_hash.py, whose CPU form is not in the wheel.
    """
    seed = seed.to(torch.int64)
    h = _mix(torch.zeros_like(seed), seed & _MASK)
    h = _mix(h, (seed >> 32) & _MASK)
    h = _mix(h, positions.to(torch.int64) & _MASK)
    h = _mix(h[:, None], col_indices.to(torch.int64)[None, :] & _MASK)
    return _finalize(h ^ 16).to(torch.uint32)  # 16 bytes were hashed


def gumbel(hashed: Tensor) -> Tensor:
    """Standard Gumbel noise of a hash: -log(-log(u)), u = hash / (2**32 - 1).

    Args:
        hashed: [...] uint32.

    Returns:
        [...] float64, -709.8 .. 22.2: the ends, u = 0 and u = 1, are kept finite as SGLang keeps
        them (`multinomial_with_seed` in sglang/srt/layers/sampler.py).
    """
    u = hashed.to(torch.float64) / _MASK
    exponential = -u.log().clamp(min=torch.finfo(torch.float64).min, max=-(2.0**-32))
    return -exponential.log()


def _mix(h: Tensor, k: Tensor) -> Tensor:
    # int64 products wrap, which keeps their low 32 bits, all that is used.
    k = _rotate((k * 0xCC9E2D51) & _MASK, 15)
    h = _rotate(h ^ ((k * 0x1B873593) & _MASK), 13)
    return (h * 5 + 0xE6546B64) & _MASK


def _rotate(x: Tensor, r: int) -> Tensor:
    return ((x << r) | (x >> (32 - r))) & _MASK


def _finalize(h: Tensor) -> Tensor:
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _MASK
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _MASK
    return h ^ (h >> 16)
