"""Linear layers by MKL or oneDNN: values, padding, the measured crossover, weight updates."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from torch import Tensor, nn

from dflash_sglang.cpu.matmul import gemm
from dflash_sglang.cpu.matmul.autotune import NEVER, TOKEN_COUNTS, crossover_tokens
from dflash_sglang.cpu.matmul.gemm import linear, padded_rows, register_weight, repack_weights
from dflash_sglang.cpu.matmul.linear_methods import (
    CpuEmbeddingMethod,
    CpuLinearMethod,
    install_linear_methods,
)

TOLERANCE: dict[str, Any] = {
    "atol": 1e-5,
    "rtol": 1e-4,
}  # float32 sums of up to 96 terms of size one


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "_registry", gemm.WeightRegistry())


@pytest.fixture
def always_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """OneDNN from the first token on."""
    monkeypatch.setattr(gemm, "measure_crossover", lambda *_: 1)


def weights() -> Iterator[Tensor]:
    """A weight as SGLang stores it, as the platform does, and one expert of several."""
    random = torch.Generator().manual_seed(0)
    yield torch.randn(40, 96, generator=random) / 10
    yield (torch.randn(96, 40, generator=random) / 10).t()
    yield (torch.randn(3, 96, 40, generator=random) / 10)[1].t()


@pytest.mark.usefixtures("always_onednn")
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 16, 31, 33, 100, 129, 300])
def test_values(monkeypatch: pytest.MonkeyPatch, tokens: int, packed: bool) -> None:
    """Also at token counts that are padded, and with strided rows."""
    if not packed:
        monkeypatch.setattr(gemm, "MAX_PACKED_BYTES", 0)
    x, bias = torch.randn(tokens, 192)[:, ::2], torch.randn(40)
    for weight in weights():
        assert (register_weight(weight).packed is not None) == packed
        expected = (x.double() @ weight.double().t()).float()
        torch.testing.assert_close(linear(x, weight), expected, **TOLERANCE)
        torch.testing.assert_close(linear(x, weight, bias), expected + bias, **TOLERANCE)


@pytest.mark.usefixtures("always_onednn")
@pytest.mark.parametrize("shape", [(96,), (2, 5, 96), (5, 7, 96), (0, 96)])
def test_shapes(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape), next(weights())
    out = linear(x, weight)
    assert out.is_contiguous()
    torch.testing.assert_close(out, torch.nn.functional.linear(x, weight), **TOLERANCE)


def test_few_tokens_stay_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    onednn = gemm._onednn_linear

    def recorded(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
        rows.append(len(x))
        return onednn(x, packed, bias)

    monkeypatch.setattr(gemm, "measure_crossover", lambda *_: 8)
    monkeypatch.setattr(gemm, "_onednn_linear", recorded)
    weight = torch.randn(4, 4)
    for tokens in (1, 7, 8, 9, 33):
        linear(torch.randn(tokens, 4), weight)
    assert rows == [8, 9, 40]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_stay_with_torch(dtype: torch.dtype) -> None:
    weight, x = torch.randn(8, 8).to(dtype), torch.randn(64, 8).to(dtype)
    assert torch.equal(linear(x, weight), torch.nn.functional.linear(x, weight))
    assert register_weight(weight).crossover == NEVER


def test_padding_adds_few_rows_and_leaves_few_counts() -> None:
    counts = range(1, 4097)
    assert all(count <= padded_rows(count) < 1.25 * count + 1 for count in counts)
    assert len({padded_rows(count) for count in counts}) < 120


def _priced(per_call: float, per_token: float) -> Callable[[Tensor], float]:
    """An implementation that returns its own time."""
    return lambda x: per_call + per_token * len(x)


def _returned_time(run: Callable[[], object]) -> float:
    time_s = run()
    assert isinstance(time_s, float)
    return time_s


@pytest.mark.parametrize(
    ("mkl", "onednn", "crossover"),
    [
        ((1.0, 2.0), (9.0, 1.0), 16),  # equal at 8
        ((1.0, 2.0), (1.0, 1.0), 2),
        ((1.0, 1.0), (9.0, 1.0), NEVER),
        ((1.0, 1.0), (1.0, 1.0), NEVER),  # as fast is not faster
        ((1.0, 2.0), (100.0, 1.0), NEVER),  # faster only above the measured counts
    ],
)
def test_the_crossover_is_found(
    mkl: tuple[float, float], onednn: tuple[float, float], crossover: int
) -> None:
    found = crossover_tokens(_priced(*mkl), _priced(*onednn), in_features=4, timer=_returned_time)
    assert found == crossover
    assert crossover in (*TOKEN_COUNTS, NEVER)


@pytest.mark.parametrize("packed", [True, False])
def test_the_crossover_of_a_weight_is_measured(packed: bool) -> None:
    """With both real implementations; which one wins depends on the machine."""
    weight = torch.randn(40, 96)
    crossover = gemm.measure_crossover(weight, gemm._pack(weight) if packed else weight)
    assert crossover in (*TOKEN_COUNTS, NEVER)


@pytest.mark.usefixtures("always_onednn")
def test_packed_weights_follow_an_update() -> None:
    weight, x = next(weights()), torch.randn(16, 96)
    before = linear(x, weight)
    weight.mul_(2)
    assert torch.equal(linear(x, weight), before)  # the packed copy still holds the old values
    repack_weights()
    torch.testing.assert_close(linear(x, weight), 2 * before, **TOLERANCE)


@pytest.mark.usefixtures("always_onednn")
def test_a_freed_weight_leaves_the_registry() -> None:
    weight = torch.randn(4, 4)
    linear(torch.randn(2, 4), weight)
    assert len(gemm._registry) == 1
    assert gemm._registry.packed_bytes == weight.nbytes
    del weight
    gc.collect()
    assert not gemm._registry
    assert gemm._registry.packed_bytes == 0


@pytest.mark.usefixtures("always_onednn")
def test_packed_copies_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = torch.randn(40, 96), torch.randn(40, 96)
    monkeypatch.setattr(gemm, "MAX_PACKED_BYTES", first.nbytes + 1)
    assert register_weight(first).packed is not None
    assert register_weight(second).packed is None
    x = torch.randn(16, 96)
    torch.testing.assert_close(linear(x, second), x @ second.t(), **TOLERANCE)


@pytest.mark.usefixtures("always_onednn")
def test_sglangs_layers_use_our_linear() -> None:
    """A linear layer with a bias, an embedding table that is also the LM head, a torch layer."""
    layer = ReplicatedLinear(96, 40, bias=True)
    table = VocabParallelEmbedding(64, 96, enable_tp=False)
    torch_layer = nn.Linear(96, 40)
    model = nn.ModuleList([layer, table, torch_layer])
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape) / 10)
    install_linear_methods(model)
    assert isinstance(layer.quant_method, CpuLinearMethod)
    assert isinstance(table.quant_method, CpuEmbeddingMethod)
    assert should_apply_lm_head_quant_method(table, table.quant_method)
    x = torch.randn(16, 96)
    torch.testing.assert_close(layer(x)[0], x @ layer.weight.t() + layer.bias, **TOLERANCE)
    logits = table.quant_method.apply(table, x, None)
    torch.testing.assert_close(logits, x @ table.weight.t(), **TOLERANCE)
    torch.testing.assert_close(
        torch_layer(x), x @ torch_layer.weight.t() + torch_layer.bias, **TOLERANCE
    )
    assert {id(layer.weight), id(table.weight), id(torch_layer.weight)} == set(gemm._registry)
    ids = torch.tensor([3, 0, 63])
    assert torch.equal(table.quant_method.embedding(table, ids), table.weight[ids])


def test_other_dtypes_keep_sglangs_methods() -> None:
    layer = ReplicatedLinear(8, 8, bias=False, params_dtype=torch.bfloat16)
    install_linear_methods(layer)
    assert not isinstance(layer.quant_method, CpuLinearMethod)
