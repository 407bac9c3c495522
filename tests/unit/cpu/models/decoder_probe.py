"""Run a verifier and a drafter through SGLang's own forward and through the fused one.

Prints the largest difference of each output, relative to its size, as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from sglang.srt.platforms import current_platform
from torch import Tensor

from dflash_sglang.cpu import register_choices

PROMPTS = [[7, 8, 9, 10, 11], [20, 21], [5, 300, 40, 41, 42, 43, 44, 45, 46]]
TAPS = [1, 3, 5]
BLOCK = 8


def load_runner(model_path: str) -> Any:
    from sglang.benchmark import one_batch
    from sglang.srt.server_args import PortArgs, prepare_server_args

    flags = ["--model-path", model_path, "--dtype", "float32", "--max-total-tokens", "512"]
    server_args = prepare_server_args([*flags, "--mem-fraction-static", "0.3"])
    server_args.resolve_once()
    rank = one_batch.spawn_world_rank(server_args, tp_rank=0, pp_rank=0)
    one_batch.publish(
        server_args, role="scheduler", ranks=one_batch.SpawnRanks(world_rank=rank, gpu_id=0)
    )
    one_batch._init_process_global_configs()
    bench_runner, _ = one_batch.load_model(server_args, PortArgs.init_new(server_args), 0, 0)
    return bench_runner.torch_runner


@contextmanager
def stock_forward(model: Any) -> Iterator[None]:
    """SGLang's own forward for a while: the fused one is an attribute of the instance."""
    fused = model.__dict__.pop("forward")
    try:
        yield
    finally:
        model.forward = fused


def verifier_outputs(runner: Any) -> dict[str, Tensor]:
    """Normed outputs and tapped inputs of a prefill and two decode steps, ragged lengths."""
    from sglang.benchmark import one_batch

    runner.req_to_token_pool.clear()
    runner.token_to_kv_pool_allocator.clear()
    recorded: list[Tensor] = []
    stack = runner.model.model
    inner = stack.forward

    def recording(*args: Any, **kwargs: Any) -> Any:
        hidden, taps = inner(*args, **kwargs)
        recorded.extend([hidden, *taps])
        return hidden, taps

    own = stack.__dict__.get("forward")
    stack.forward = recording
    requests = one_batch.prepare_synthetic_inputs_for_latency_test(len(PROMPTS), 0, PROMPTS)
    tokens, _, batch = one_batch.extend(requests, runner)
    for _ in range(2):
        tokens, _ = one_batch.decode(tokens, batch, runner)
    del stack.forward
    if own is not None:
        stack.forward = own
    return {f"verifier {i}": out for i, out in enumerate(recorded)}


def load_drafter(path: Path) -> Any:
    from sglang.srt.models.dflash import DFlashDraftModel
    from transformers import AutoConfig

    drafter = DFlashDraftModel(AutoConfig.from_pretrained(path)).float().eval()
    drafter.load_weights(load_file(path / "model.safetensors").items())
    return drafter


def drafter_outputs(drafter: Any) -> dict[str, Tensor]:
    """A block of embeddings for two requests with context."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    from dflash_sglang.cpu.attention.backend import CpuAttentionBackend
    from dflash_sglang.cpu.attention.kv_pool import CpuKVPool

    attention = drafter.layers[0].self_attn
    pool = CpuKVPool(
        size=100,
        page_size=1,
        dtype=torch.float32,
        head_num=attention.num_kv_heads,
        head_dim=attention.head_dim,
        layer_num=len(drafter.layers),
        device="cpu",
        enable_memory_saver=False,
    )
    random = torch.Generator().manual_seed(0)
    for layer in range(len(drafter.layers)):
        pool.kv_pair(layer).normal_(generator=random)
    req_to_token = (torch.randperm(80, generator=random) + 1).int().view(2, 40)
    backend = CpuAttentionBackend(
        SimpleNamespace(
            token_to_kv_pool=pool, req_to_token_pool=SimpleNamespace(req_to_token=req_to_token)
        )
    )
    lengths = torch.tensor([9, 20])
    positions = lengths[:, None] + torch.arange(BLOCK)
    batch = SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=2,
        seq_lens=lengths,
        req_pool_indices=torch.tensor([0, 1]),
        spec_info=SimpleNamespace(draft_token_num=BLOCK),
        out_cache_loc=req_to_token.gather(1, positions).flatten().long(),
        global_num_token_non_padded_cpu=None,
    )
    embeds = torch.randn(2 * BLOCK, drafter.config.hidden_size, generator=random)
    backend.init_forward_metadata(batch)
    with forward_context(ForwardContext(attn_backend=backend)):
        out = drafter.forward(None, positions.flatten(), batch, input_embeds=embeds)
    return {"drafter": out.hidden_states}


def difference(model: Any, outputs: Callable[[], dict[str, Tensor]]) -> dict[str, float]:
    """Largest relative difference between the two forwards, by output."""
    fused = outputs()
    with stock_forward(model):
        stock = outputs()
    assert fused.keys() == stock.keys()
    return {
        name: float((fused[name] - stock[name]).abs().max() / stock[name].abs().max())
        for name in fused
    }


def updated_weights(runner: Any) -> dict[str, float]:
    """Relative error of two linear layers after an update of their weights."""
    from dflash_sglang.cpu.matmul.expert_autotune import expert_weights
    from dflash_sglang.cpu.matmul.gemm import linear

    layer = runner.model.model.layers[0]
    projection = layer.self_attn.o_proj.weight
    experts = expert_weights(layer.mlp.experts)
    new = {"self_attn.o_proj": 2 * projection, "mlp.experts.3.down_proj": experts.each_down[3] / 2}
    x = torch.randn(16, projection.shape[1])
    inner = torch.randn(16, experts.all_down.shape[1])
    before = linear(x, projection), linear(inner, experts.all_down)
    done, message = runner.weight_updater.update_weights_from_tensor(
        [(f"model.layers.0.{name}.weight", value.clone()) for name, value in new.items()]
    )
    assert done, message
    after = linear(x, projection), linear(inner, experts.all_down)
    expected = x @ projection.t(), inner @ experts.all_down.t()
    assert all((old - value).abs().max() > 0.1 for old, value in zip(before, expected, strict=True))
    return {
        f"update {i}": float((out - value).abs().max() / value.abs().max())
        for i, (out, value) in enumerate(zip(after, expected, strict=True))
    }


@torch.inference_mode()
def main(verifier: str, drafter: str) -> None:
    register_choices()
    runner = load_runner(verifier)
    model = runner.model
    model.set_dflash_layers_to_capture([tap - 1 for tap in TAPS])
    found = difference(model.model, lambda: verifier_outputs(runner))
    draft = load_drafter(Path(drafter))
    current_platform.post_load_model(draft)
    found |= difference(draft, lambda: drafter_outputs(draft))
    found |= updated_weights(runner)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
