"""Write the trained pair as checkpoints that transformers and SGLang load, in bfloat16."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from bench.train import data
from bench.train.verifier.checkpoint import verifier_config, verifier_tensors
from bench.train.verifier.model import Verifier
from dflash_sglang.drafter.checkpoint import DraftConfig
from dflash_sglang.drafter.reference import DraftModel


def export_verifier(model: Verifier, tokenizer_file: Path, directory: Path) -> None:
    """Write the verifier's checkpoint with its tokenizer and chat template."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: _bf16(tensor) for name, tensor in verifier_tensors(model).items()}
    _save(tensors, directory / "model.safetensors")
    _write_json(directory / "config.json", verifier_config(model.shape))
    generation = {"eos_token_id": data.END_ID, "pad_token_id": data.PAD_ID}
    _write_json(directory / "generation_config.json", generation)
    end, start, stop, mask = data.SPECIAL_TOKENS
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer_file),
        eos_token=stop,
        pad_token=end,
        mask_token=mask,
        additional_special_tokens=[start],
    )
    tokenizer.chat_template = data.CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)


def export_drafter(model: DraftModel, directory: Path) -> None:
    """Write a plain DFlash head; it has no embedding and no LM head."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: _bf16(tensor) for name, tensor in model.state_dict().items()}
    _save(tensors, directory / "model.safetensors")
    _write_json(directory / "config.json", drafter_config(model.config))


def drafter_config(config: DraftConfig) -> dict[str, Any]:
    """The content of the drafter's config.json."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": False,
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "dflash_config": {
            "target_layer_ids": list(config.target_layer_ids),
            "mask_token_id": config.mask_token_id,
        },
        "torch_dtype": "bfloat16",
    }


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o644)  # it is created for the owner alone; an installed package is read by others


def _bf16(tensor: Tensor) -> Tensor:
    # A copy: safetensors refuses tensors that share memory.
    return tensor.detach().to(torch.bfloat16, copy=True).contiguous()


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
