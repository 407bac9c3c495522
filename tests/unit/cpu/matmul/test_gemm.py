"""Products by either library: values, rows, the measured crossing, copies that follow updates."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from torch import Tensor, nn

from dflash_sglang.cpu.matmul import gemm as products
from dflash_sglang.cpu.matmul.gemm import NEVER, TOKEN_COUNTS, linear, refresh, remember, rounded
from dflash_sglang.cpu.matmul.linear import CpuEmbeddingMethod, CpuLinearMethod, install_products

TOLERANCE = {"atol": 1e-5, "rtol": 1e-4}  # float32 sums of up to 96 terms of size one


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_weights", products.Weights())


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """OneDNN from the first token on."""
    monkeypatch.setattr(products, "measure_begin", lambda *_: 1)


def weights() -> Iterator[Tensor]:
    """A weight as SGLang stores it, as the platform does, and one expert of several."""
    random = torch.Generator().manual_seed(0)
    yield torch.randn(40, 96, generator=random) / 10
    yield (torch.randn(96, 40, generator=random) / 10).t()
    yield (torch.randn(3, 96, 40, generator=random) / 10)[1].t()


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 16, 31, 33, 100, 129, 300])
def test_values(monkeypatch: pytest.MonkeyPatch, tokens: int, copy: bool) -> None:
    """At counts that are rounded up too, with rows that are not whole in memory."""
    if not copy:
        monkeypatch.setattr(products, "MAX_COPIES", 0)
    x, bias = torch.randn(tokens, 192)[:, ::2], torch.randn(40)
    for weight in weights():
        assert (remember(weight).copy is not None) == copy
        expected = (x.double() @ weight.double().t()).float()
        torch.testing.assert_close(linear(x, weight), expected, **TOLERANCE)
        torch.testing.assert_close(linear(x, weight, bias), expected + bias, **TOLERANCE)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("shape", [(96,), (2, 5, 96), (5, 7, 96), (0, 96)])
def test_shapes(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape), next(weights())
    out = linear(x, weight)
    assert out.is_contiguous()
    torch.testing.assert_close(out, torch.nn.functional.linear(x, weight), **TOLERANCE)


def test_few_tokens_stay_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(products, "measure_begin", lambda *_: 8)
    monkeypatch.setattr(products, "_onednn", lambda x, *_: asked.append(len(x)) or x)
    weight = torch.randn(4, 4)
    for tokens in (1, 7, 8, 9, 33):
        linear(torch.randn(tokens, 4), weight)
    assert asked == [8, 9, 40]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_stay_with_torch(dtype: torch.dtype) -> None:
    weight, x = torch.randn(8, 8).to(dtype), torch.randn(64, 8).to(dtype)
    assert torch.equal(linear(x, weight), torch.nn.functional.linear(x, weight))
    assert remember(weight).begin == NEVER


def test_rounding_adds_little_and_leaves_few_counts() -> None:
    counts = range(1, 4097)
    assert all(count <= rounded(count) < 1.25 * count + 1 for count in counts)
    assert len({rounded(count) for count in counts}) < 120


def _priced(begin: float, slope: float) -> Callable[..., Tensor]:
    """Stands for a product: what it costs is in its result."""
    return lambda x, *_: torch.tensor(begin + slope * len(x))


@pytest.mark.parametrize(
    ("mkl", "onednn", "begin"),
    [
        ((1, 2), (9, 1), 16),  # equal at 8
        ((1, 2), (1, 1), 2),
        ((1, 1), (9, 1), NEVER),
        ((1, 1), (1, 1), NEVER),  # as fast is not faster
        ((1, 2), (100, 1), NEVER),  # faster only where nothing is measured
    ],
)
def test_the_crossing_is_found(
    monkeypatch: pytest.MonkeyPatch,
    mkl: tuple[float, float],
    onednn: tuple[float, float],
    begin: int,
) -> None:
    monkeypatch.setattr(products.F, "linear", _priced(*mkl))
    monkeypatch.setattr(products, "_onednn", _priced(*onednn))
    monkeypatch.setattr(products, "fastest", lambda run: float(run()))
    assert products.measure_begin(torch.ones(4, 4), torch.ones(4, 4)) == begin
    assert begin in (*TOKEN_COUNTS, NEVER)


@pytest.mark.usefixtures("always")
def test_copies_follow_an_update() -> None:
    weight, x = next(weights()), torch.randn(16, 96)
    before = linear(x, weight)
    weight.mul_(2)
    assert torch.equal(linear(x, weight), before)  # the copy is still the old one
    refresh()
    torch.testing.assert_close(linear(x, weight), 2 * before, **TOLERANCE)


@pytest.mark.usefixtures("always")
def test_a_weight_that_is_gone_is_forgotten() -> None:
    weight = torch.randn(4, 4)
    linear(torch.randn(2, 4), weight)
    assert len(products._weights) == 1
    assert products._weights.copied == weight.nbytes
    del weight
    gc.collect()
    assert not products._weights
    assert products._weights.copied == 0


@pytest.mark.usefixtures("always")
def test_copies_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = torch.randn(40, 96), torch.randn(40, 96)
    monkeypatch.setattr(products, "MAX_COPIES", first.nbytes + 1)
    assert remember(first).copy is not None
    assert remember(second).copy is None
    x = torch.randn(16, 96)
    torch.testing.assert_close(linear(x, second), x @ second.t(), **TOLERANCE)


@pytest.mark.usefixtures("always")
def test_sglangs_layers_are_multiplied_here() -> None:
    """A linear layer with its bias, a table of embeddings that is also the head, one of torch's."""
    model = nn.ModuleList(
        [
            ReplicatedLinear(96, 40, bias=True),
            VocabParallelEmbedding(64, 96, enable_tp=False),
            nn.Linear(96, 40),
        ]
    )
    layer, table, torchs = model
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape) / 10)
    install_products(model)
    assert isinstance(layer.quant_method, CpuLinearMethod)
    assert isinstance(table.quant_method, CpuEmbeddingMethod)
    assert should_apply_lm_head_quant_method(table, table.quant_method)
    x = torch.randn(16, 96)
    torch.testing.assert_close(layer(x)[0], x @ layer.weight.t() + layer.bias, **TOLERANCE)
    logits = table.quant_method.apply(table, x, None)
    torch.testing.assert_close(logits, x @ table.weight.t(), **TOLERANCE)
    torch.testing.assert_close(torchs(x), x @ torchs.weight.t() + torchs.bias, **TOLERANCE)
    assert {id(layer.weight), id(table.weight), id(torchs.weight)} == set(products._weights)
    ids = torch.tensor([3, 0, 63])
    assert torch.equal(table.quant_method.embedding(table, ids), table.weight[ids])


def test_other_dtypes_keep_sglangs_methods() -> None:
    layer = ReplicatedLinear(8, 8, bias=False, params_dtype=torch.bfloat16)
    install_products(layer)
    assert not isinstance(layer.quant_method, CpuLinearMethod)
