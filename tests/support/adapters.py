"""LoRA adapters of random weights for the embedded MoE verifier, in PEFT's format."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from dflash_sglang import zoo

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def write_adapter(
    folder: Path,
    seed: int,
    rank: int,
    strength: float,
    targets: Iterable[str] = ATTENTION,
    alpha: float | None = None,
) -> Path:
    """Write an adapter.

    Args:
        folder: made here.
        seed: of its weights.
        rank: of its matrices.
        strength: by how much a projection's output moves, where its input's elements have size 1.
            Below 1 most texts stay as they are; around 2 all change.
        targets: projections of the attention, and perhaps ``embed_tokens``.
        alpha: over the rank, the factor on both matrices; by default twice the rank.

    Returns:
        The folder.
    """
    alpha = 2 * rank if alpha is None else alpha
    spread_of_second = strength * rank**0.5 / alpha
    shapes = _shapes()
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for target in targets:
        outputs, inputs = shapes[target]
        first, second = "lora_A.weight", "lora_B.weight"
        if target == "embed_tokens":
            first, second = "lora_embedding_A", "lora_embedding_B"
        for name in _modules(target):
            spread = 0.1 if target == "embed_tokens" else inputs**-0.5
            tensors[f"{name}.{first}"] = spread * torch.randn(rank, inputs, generator=random)
            tensors[f"{name}.{second}"] = spread_of_second * torch.randn(
                outputs, rank, generator=random
            )
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "bias": "none",
        "use_dora": False,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _config() -> dict[str, int]:
    config: dict[str, int] = json.loads((zoo.path("moe").verifier / "config.json").read_text())
    return config


def _shapes() -> dict[str, tuple[int, int]]:
    """Outputs and inputs of each target."""
    config = _config()
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    return {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "embed_tokens": (hidden, config["vocab_size"]),
    }


def _modules(target: str) -> list[str]:
    model = "base_model.model.model"
    if target == "embed_tokens":
        return [f"{model}.{target}"]
    layers = range(_config()["num_hidden_layers"])
    return [f"{model}.layers.{layer}.self_attn.{target}" for layer in layers]
