"""Context KV of all layers at once: what one layer after the other writes, or a reason why not."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.models.dflash import DFlashDraftModel
from sglang.srt.runtime_context import get_context, get_parallel
from transformers import Qwen3Config

from dflash_sglang.step.context_kv import ContextKV
from dflash_sglang.step.setup.layer_stack import stack_layers, stack_problem

LAYERS, HIDDEN, SLOTS = 3, 48, 40
FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    group = SimpleNamespace(world_size=1, rank_in_group=0, ranks=[0])
    flags = {"speculative_algorithm": "DFLASH", "speculative_num_draft_tokens": 4}
    with (
        get_context().override_server_args(**flags),
        get_parallel().override(tp_group=group, tp_rank=0, attn_tp_rank=0),
    ):
        yield


def drafter(**changed: Any) -> Any:
    config = Qwen3Config(
        vocab_size=50,
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        block_size=4,
        num_target_layers=6,
        dflash_config={"target_layer_ids": [1, 3], "mask_token_id": 3},
        **changed,
    )
    model = DFlashDraftModel(config).float().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(0.3 * torch.randn(param.shape, generator=generator))
    return model


def pool(dtype: torch.dtype = torch.float32, **changed: Any) -> Any:
    sizes = {"head_num": 2, "head_dim": 16, "layer_num": LAYERS, **changed}
    return MHATokenToKVPool(
        size=SLOTS, page_size=1, dtype=dtype, device="cpu", enable_memory_saver=False, **sizes
    )


def written(model: Any, dtype: torch.dtype, *, one_by_one: bool) -> torch.Tensor:
    """Keys and values of every layer after a write of seven tokens."""
    runner = SimpleNamespace(model=model, token_to_kv_pool=pool(dtype))
    context = ContextKV(runner, SimpleNamespace(tp_group=None))  # type: ignore[arg-type]
    context.bind()
    context._one_by_one |= one_by_one
    generator = torch.Generator().manual_seed(1)
    context.append(
        torch.randn(7, 2 * HIDDEN, generator=generator),
        torch.randperm(SLOTS, generator=generator)[:7],
        torch.arange(7) + 100,
    )
    buffers = [*runner.token_to_kv_pool.k_buffer, *runner.token_to_kv_pool.v_buffer]
    return torch.stack([one.view(dtype).float() for one in buffers])


@pytest.mark.parametrize("changed", [{}, {"attention_bias": True}, {"use_gemma_norm": True}])
def test_all_at_once_is_one_after_the_other(changed: dict[str, Any]) -> None:
    model = drafter(**changed)
    assert stack_problem(model, pool()) is None
    got, expected = (written(model, torch.float32, one_by_one=one) for one in (False, True))
    assert expected.abs().sum() > 0
    # float32 sums over 48 terms in another order.
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_fp8_caches_are_divided_by_their_scales() -> None:
    model = drafter()
    for layer, scale in zip(model.layers, (0.5, None, 2.0), strict=True):
        layer.self_attn.attn.k_scale = scale
        layer.self_attn.attn.v_scale = scale
    got, expected = (written(model, FP8, one_by_one=one) for one in (False, True))
    # Three mantissa bits; rounding in another place may give the next value.
    torch.testing.assert_close(got, expected, rtol=0.13, atol=2**-9)
    assert (got == expected).float().mean() > 0.99


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8, torch.float8_e5m2])
def test_every_kv_dtype_holds_the_same_keys_and_values(dtype: torch.dtype) -> None:
    """Those of --speculative-draft-kv-cache-dtype, written at once or layer by layer."""
    model = drafter()
    exact = written(model, torch.float32, one_by_one=True)
    # The last bit: both ways round once, sums of other orders.
    step = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        written(model, dtype, one_by_one=False), exact, rtol=step, atol=torch.finfo(dtype).tiny
    )


def test_quantised_projections_are_written_layer_by_layer() -> None:
    """As --speculative-draft-model-quantization makes them: weights only the method can read."""

    class Quantised:
        """Keeps weights in FP8."""

        def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return torch.nn.functional.linear(x, layer.weight.float(), bias)

    model, rounded = drafter(), drafter()
    for layer, twin in zip(model.layers, rounded.layers, strict=True):
        projection, plain = layer.self_attn.qkv_proj, twin.self_attn.qkv_proj
        projection.weight = torch.nn.Parameter(projection.weight.to(FP8), requires_grad=False)
        projection.quant_method = Quantised()
        plain.weight.data = plain.weight.to(FP8).float()
    assert "layer 0: quantized" in str(stack_problem(model, pool()))
    got = written(model, torch.float32, one_by_one=False)
    expected = written(rounded, torch.float32, one_by_one=True)
    assert expected.abs().sum() > 0
    # float32 sums over 48 terms in another order.
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_new_weights_are_stacked_before_the_next_write() -> None:
    model = drafter()
    runner = SimpleNamespace(model=model, token_to_kv_pool=pool())
    context = ContextKV(runner, SimpleNamespace(tp_group=None))  # type: ignore[arg-type]
    context.bind()
    chunk = torch.ones(1, 2 * HIDDEN), torch.tensor([5]), torch.tensor([9])
    context.append(*chunk)
    before = runner.token_to_kv_pool.v_buffer[0][5].clone()
    context.weights_change()
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.qkv_proj.weight.mul_(2)
    context.append(*chunk)
    torch.testing.assert_close(runner.token_to_kv_pool.v_buffer[0][5], 2 * before)


def test_keys_come_before_values_layer_by_layer() -> None:
    model = drafter()
    stack = stack_layers(model, pool())
    assert stack.shape == (LAYERS, 2, 2, 16)
    rows = stack.weight.view(LAYERS, 2, 32, HIDDEN)
    for index, layer in enumerate(model.layers):
        weight = layer.self_attn.qkv_proj.weight
        assert torch.equal(rows[index, 0], weight[64:96])
        assert torch.equal(rows[index, 1], weight[96:128])


class OwnPool(MHATokenToKVPool):
    """A pool with a layout of its own."""

    def set_kv_buffer(self, *_: Any, **__: Any) -> None:  # type: ignore[override]
        raise AssertionError


class OwnInput(DFlashDraftModel):
    """A drafter whose layers see the context through norms of their own."""

    def prepare_context_hidden_for_kv(self, layer: Any, ctx_hidden: Any) -> Any:
        raise AssertionError


def test_what_the_op_does_not_serve_is_named() -> None:
    own = drafter()
    own.__class__ = OwnInput
    assert stack_problem(own, pool()) == "each layer has its own input"

    quantized = drafter()
    quantized.layers[1].self_attn.qkv_proj.quant_method = object()
    assert "layer 1: quantized" in str(stack_problem(quantized, pool()))
    assert isinstance(drafter().layers[1].self_attn.qkv_proj.quant_method, UnquantizedLinearMethod)

    scaled = drafter()
    scaled.layers[2].self_attn.v_scale = 0.5
    assert stack_problem(scaled, pool()) == "layer 2 scales its values"

    uneven = drafter()
    uneven.layers[1].self_attn.k_norm.variance_epsilon = 1e-3
    assert "layer 1 differs from layer 0" in str(stack_problem(uneven, pool()))

    paired = drafter()
    paired.layers[0].self_attn.rotary_emb.is_neox_style = False
    assert "does not rotate halves" in str(stack_problem(paired, pool()))
    paired.layers[0].self_attn.rotary_emb.is_neox_style = True  # SGLang keeps the module

    model, other = drafter(), pool()
    other.__class__ = OwnPool
    assert stack_problem(model, other) == "OwnPool stores in its own way"
    assert "holds torch.float8_e5m2" in str(stack_problem(model, pool(torch.float8_e5m2)))
    assert "different sizes" in str(stack_problem(model, pool(v_head_dim=8)))
