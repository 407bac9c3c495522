"""The context KV's reference against plain loops, and its refusals."""

import math

import pytest
import torch
from dflash_kernels.context_kv import context_kv
from dflash_kernels.types import LayerCaches
from torch import Tensor

FP8 = torch.float8_e4m3fn


def by_loop(key: list[float], weight: list[float], cos_sin: list[float], eps: float) -> list[float]:
    """One head's key, in Python's float64."""
    size, half = len(key), len(cos_sin) // 2
    rms = math.sqrt(sum(x * x for x in key) / size + eps)
    n = [x / rms * w for x, w in zip(key, weight, strict=True)]
    out = list(n)
    for i in range(half):
        cos, sin = cos_sin[i], cos_sin[half + i]
        out[i] = n[i] * cos - n[half + i] * sin
        out[half + i] = n[half + i] * cos + n[i] * sin
    return out


@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_against_a_loop(rotary_dim: int) -> None:
    generator = torch.Generator().manual_seed(rotary_dim)
    tokens, layers, heads, head_dim = 6, 2, 3, 8
    kv = torch.randn(tokens, layers, 2, heads, head_dim, generator=generator)
    weights = torch.rand(layers, head_dim, generator=generator)
    cos_sin = torch.randn(20, rotary_dim, generator=generator)
    positions = torch.randint(0, 20, (tokens,), generator=generator)
    slots = torch.tensor([3, -1, 0, 5, 9, 2])
    keys, values = torch.full((2, layers, 10, heads, head_dim), 9.0)

    context_kv(
        kv,
        weights,
        cos_sin,
        positions,
        slots,
        LayerCaches.of(list(keys), list(values)),
        eps=0.01,
        valid_lens=torch.tensor([3, 2], dtype=torch.int32),
    )

    # Blocks of three tokens: all of the first but the negative slot, two of the second.
    written = {slot: token for token, slot in enumerate(slots.tolist()) if token != 5 and slot >= 0}
    for layer in range(layers):
        for slot in range(10):
            for head in range(heads):
                expected_key = expected_value = [9.0] * head_dim
                if slot in written:
                    token = written[slot]
                    angles = cos_sin[positions[token]].tolist()
                    key, value = kv[token, layer, :, head].tolist()
                    expected_key = by_loop(key, weights[layer].tolist(), angles, 0.01)
                    expected_value = value
                # float32 against float64, a dozen operations on numbers below ten.
                assert keys[layer, slot, head].tolist() == pytest.approx(expected_key, abs=1e-5)
                assert values[layer, slot, head].tolist() == expected_value


def test_fp8_divides_by_the_layers_scale_and_saturates() -> None:
    kv = torch.full((1, 2, 2, 1, 4), 3.0)
    scales = torch.tensor([[1.0, 2.0], [1.0, 0.001]])
    keys, values = (torch.zeros(2, 4, 1, 4).to(FP8) for _ in range(2))
    caches = LayerCaches.of(list(keys), list(values), scales)
    one, ones = torch.ones(1, dtype=torch.int64), torch.ones(2, 4)
    still = torch.tensor([[1.0, 1.0, 0.0, 0.0]]).expand(4, 4)
    context_kv(kv, ones, still, one, one, caches, eps=0.0)
    assert keys[:, 1].float().unique().tolist() == [1.0]
    assert values[0, 1].float().unique().tolist() == [1.5]
    assert values[1, 1].float().unique().tolist() == [448.0]


def caches_of(layers: int = 2, heads: int = 1, head_dim: int = 4) -> LayerCaches:
    keys, values = torch.zeros(2, layers, 4, heads, head_dim)
    return LayerCaches.of(list(keys), list(values))


def call(
    kv: Tensor, rotary_dim: int = 4, bs: int | None = None, weights: Tensor | None = None
) -> None:
    tokens = torch.zeros(kv.shape[0], dtype=torch.int64)
    context_kv(
        kv,
        torch.ones(2, 4) if weights is None else weights,
        torch.ones(9, rotary_dim),
        tokens,
        tokens,
        caches_of(),
        eps=0.0,
        valid_lens=None if bs is None else torch.ones(bs, dtype=torch.int32),
    )


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"kv of shape \(3, 2, 2, 1, 4\), got \(3, 1, 2, 1, 4\)"):
        call(torch.ones(3, 1, 2, 1, 4))
    with pytest.raises(ValueError, match=r"norm_weights of shape \(2, 4\), got \(4,\)"):
        call(torch.ones(3, 2, 2, 1, 4), weights=torch.ones(4))
    with pytest.raises(ValueError, match="contiguous tokens"):
        call(torch.ones(3, 2, 2, 1, 8)[..., ::2])
    for rotary_dim in (3, 6):
        with pytest.raises(ValueError, match="rotary_dim"):
            call(torch.ones(3, 2, 2, 1, 4), rotary_dim)
    with pytest.raises(ValueError, match="equal width, got 3 tokens and 2 valid_lens"):
        call(torch.ones(3, 2, 2, 1, 4), bs=2)


def test_buffers_that_differ_are_refused() -> None:
    buffer = torch.zeros(4, 2, 8)
    for other in (torch.zeros(4, 1, 8), buffer.half(), torch.zeros(4, 8, 2).mT):
        with pytest.raises(ValueError, match="expected buffers"):
            LayerCaches.of([buffer], [other])
    shared = torch.zeros(4 * 2 * 8 + 8)
    apart = [shared.as_strided((4, 2, 8), (16, 8, 1), offset) for offset in (0, 8)]
    with pytest.raises(ValueError, match=r"multiple of 16 elements apart.*8"):
        LayerCaches.of(apart, apart)
    with pytest.raises(ValueError, match="scales are for"):
        LayerCaches.of([buffer], [buffer], torch.ones(1, 2))
