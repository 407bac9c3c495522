"""Writes pairs of checkpoints to disk: real configurations, weights as sparse files of zeros."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from dflash_sglang.drafter.checkpoint import expected_tensors, parse_config

_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I8": 1}


@dataclass
class PairFiles:
    """Content of two checkpoint folders; change what a test is about, then `write`."""

    verifier: dict[str, Any]
    draft: dict[str, Any]
    tokenizer: dict[str, Any] | None
    generation: dict[str, Any]
    verifier_tensors: dict[str, tuple[int, ...]]
    draft_tensors: dict[str, tuple[int, ...]]
    dtypes: dict[str, str] = field(default_factory=dict)  # of single draft tensors
    chat_template: str = ""

    @property
    def dflash(self) -> dict[str, Any]:
        return cast(dict[str, Any], self.draft["dflash_config"])

    @property
    def text(self) -> dict[str, Any]:
        return cast(dict[str, Any], self.verifier.get("text_config", self.verifier))

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write both folders below `folder`; returns (verifier, drafter)."""
        verifier, draft = folder / "verifier", folder / "drafter"
        for place, config in ((verifier, self.verifier), (draft, self.draft)):
            place.mkdir(parents=True)
            (place / "config.json").write_text(json.dumps(config))
        (verifier / "generation_config.json").write_text(json.dumps(self.generation))
        if self.tokenizer is not None:
            (verifier / "tokenizer.json").write_text(json.dumps(self.tokenizer))
        if self.chat_template:
            (verifier / "chat_template.jinja").write_text(self.chat_template)
        write_safetensors(verifier / "model.safetensors", self.verifier_tensors)
        write_safetensors(draft / "model.safetensors", self.draft_tensors, self.dtypes)
        return verifier, draft


def write_safetensors(
    file: Path, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str] | None = None
) -> None:
    """A safetensors file of zeros; the data is a hole, so a real geometry costs no disk."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        dtype = (dtypes or {}).get(name, "BF16")
        size = _BYTES[dtype]
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + end)


def tokenizer(ordinary: Mapping[str, int], added: Mapping[str, int]) -> dict[str, Any]:
    return {
        "added_tokens": [{"id": i, "content": t, "special": True} for t, i in added.items()],
        "model": {"type": "BPE", "vocab": dict(ordinary)},
    }


def head_tensors(draft: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return expected_tensors(parse_config(draft))


def small_pair() -> PairFiles:
    """A Qwen3-MoE pair of the embedded pair's size; every test may change it."""
    draft = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "dtype": "bfloat16",
        "max_position_embeddings": 2048,
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rope_theta": 10000.0,
        "vocab_size": 1024,
        "num_target_layers": 6,
        "layer_types": ["full_attention", "full_attention"],
        "dflash_config": {"target_layer_ids": [1, 3, 4], "mask_token_id": 3, "block_size": 16},
    }
    verifier = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 1024,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "eos_token_id": 2,
    }
    added = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2, "<|mask|>": 3}
    return PairFiles(
        verifier=verifier,
        draft=draft,
        tokenizer=tokenizer({"a": 4, "b": 5}, added),
        generation={"eos_token_id": [2]},
        verifier_tensors={
            "model.embed_tokens.weight": (1024, 256),
            "lm_head.weight": (1024, 256),
        },
        draft_tensors=head_tensors(draft),
        chat_template="<|im_start|>{{ message }}<|im_end|>",
    )
