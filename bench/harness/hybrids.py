"""A hybrid pair and conversations with it, for tests of recurrent layers under speculation."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.harness import checkpoints
from bench.harness.requests import greedy, send_all
from bench.harness.scripts import SPARE_TOKENS, Continuation
from dflash_sglang import zoo
from launch.client import Client

LAYERS = 4
TAPS = [0, 1, 2]
MAX_NEW_TOKENS = 96
TURNS = 3
QUESTION = 7  # tokens of each turn but the first
# Shorter than a window, around a chunk's length, of several chunks.
PROMPT_LENS = (1, 2, 5, 17, 33, 63, 64, 65, 100, 128, 150, 200)
CONFIG: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "num_hidden_layers": LAYERS,
    "full_attention_interval": LAYERS,
    "layer_types": ["linear_attention"] * (LAYERS - 1) + ["full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def hybrid_pair(folder: Path) -> zoo.Pair:
    """A Qwen3.5-MoE verifier with random weights, and an untrained drafter."""
    from transformers import AutoModelForCausalLM, Qwen3_5MoeTextConfig

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3_5MoeTextConfig(**CONFIG))
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.3 if "conv" in name else 0.06)
    verifier = folder / "verifier"
    verifier.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(zoo.path("moe").verifier / name, verifier)
    names = {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"}
    (verifier / "config.json").write_text(json.dumps({**names, **CONFIG, "dtype": "float32"}))
    save_file(model.state_dict(), verifier / "model.safetensors", metadata={"format": "pt"})
    drafter = checkpoints.random_drafter(folder / "drafter")
    config = json.loads((drafter / "config.json").read_text())
    config |= {"num_target_layers": LAYERS}
    config["dflash_config"] |= {"target_layer_ids": TAPS}
    (drafter / "config.json").write_text(json.dumps(config))
    return zoo.Pair(verifier, drafter)


def endless(prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    """A request for so many tokens: random weights say end-of-text as anything else."""
    return greedy(prompt, tokens, ignore_eos=True)


def converse(plain: Client) -> list[list[Continuation]]:
    """Plain decoding's answers in each turn of every conversation, past their ends.

    Returns:
        By turn, then by conversation.
    """
    chance = random.Random(0)
    prompts = [tuple(_tokens(chance, length)) for length in PROMPT_LENS]
    turns: list[list[Continuation]] = []
    for _ in range(TURNS):
        payloads = [endless(prompt, MAX_NEW_TOKENS + SPARE_TOKENS) for prompt in prompts]
        answers = send_all(plain, payloads)
        turns.append(
            [
                Continuation(prompt, tuple(answer["output_ids"]))
                for prompt, answer in zip(prompts, answers, strict=True)
            ]
        )
        prompts = [
            (*turn.prompt_ids, *answer_of(turn), *_tokens(chance, QUESTION)) for turn in turns[-1]
        ]
    return turns


def answer_of(turn: Continuation) -> tuple[int, ...]:
    """The answer that a conversation goes on with."""
    return turn.output_ids[:MAX_NEW_TOKENS]


def send_turn(
    server: Client, turn: Sequence[Continuation], rids: Sequence[str], concurrency: int = 8
) -> list[Any]:
    """The answers of a server to one turn of all conversations, drafts scripted by the ids."""
    payloads = [
        {**endless(one.prompt_ids, MAX_NEW_TOKENS), "rid": rid}
        for one, rid in zip(turn, rids, strict=True)
    ]
    return send_all(server, payloads, concurrency)


def _tokens(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(10, CONFIG["vocab_size"]) for _ in range(count)]
