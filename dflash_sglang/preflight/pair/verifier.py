"""What a draft head needs to know of its verifier, read from files next to the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_sglang.drafter.checkpoint import CheckpointError, TensorInfo, read_headers
from dflash_sglang.json_values import as_int, read_object
from dflash_sglang.preflight.pair.architectures import OUTER_TIE_ARCHITECTURES
from dflash_sglang.preflight.pair.head_family import architectures

# Wrappers of multimodal models keep the language model's configuration under one of these.
_TEXT_SECTIONS = ("text_config", "llm_config", "language_config")
_LAST_MTP_KEYS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")


@dataclass(frozen=True)
class VerifierFacts:
    """What of a verifier decides whether a draft head fits. None: the files do not say."""

    architectures: tuple[str, ...] | None
    num_layers: int | None
    num_mtp_layers: int  # extra prediction layers behind the stack, which some tools count in
    hidden_size: int | None
    vocab_size: int | None
    max_position_embeddings: int | None
    rope_theta: float | None
    tied: bool
    dtype: str | None
    stop_ids: frozenset[int]  # from generation_config.json and config.json
    weight_names: frozenset[str] | None  # None: no safetensors here
    tokens: Mapping[int, str] | None  # ordinary tokens, id -> text; None: no tokenizer.json here
    added_tokens: Mapping[int, str]  # added and special tokens, id -> text
    chat_template: str


# A verifier whose files are not on this machine: rules about the drafter alone still apply.
UNKNOWN_VERIFIER = VerifierFacts(
    architectures=None,
    num_layers=None,
    num_mtp_layers=0,
    hidden_size=None,
    vocab_size=None,
    max_position_embeddings=None,
    rope_theta=None,
    tied=False,
    dtype=None,
    stop_ids=frozenset(),
    weight_names=None,
    tokens=None,
    added_tokens={},
    chat_template="",
)


def text_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a configuration; the configuration itself for a text model."""
    sections = (config.get(key) for key in _TEXT_SECTIONS)
    return next((section for section in sections if isinstance(section, Mapping)), config)


def read_facts(
    folder: Path, config: Mapping[str, Any], weight_names: frozenset[str] | None
) -> VerifierFacts:
    """Collect the facts of a verifier.

    Args:
        folder: the verifier's folder.
        config: content of its config.json.
        weight_names: tensor names, from `weight_headers`; None where they could not be read.

    Raises:
        CheckpointError: a side file (tokenizer, generation config) is damaged.
    """
    text = text_section(config)
    ordinary, added = _tokens(folder)
    loops = as_int(text.get("num_loops")) or 1
    layers = as_int(text.get("num_hidden_layers"))
    dtype = text.get(
        "dtype", text.get("torch_dtype", config.get("dtype", config.get("torch_dtype")))
    )
    return VerifierFacts(
        architectures=architectures(config),
        num_layers=None if layers is None else layers * loops,
        num_mtp_layers=next((n for key in _LAST_MTP_KEYS if (n := as_int(text.get(key)))), 0),
        hidden_size=as_int(text.get("hidden_size")),
        vocab_size=as_int(text.get("vocab_size")),
        max_position_embeddings=as_int(text.get("max_position_embeddings")),
        rope_theta=rope_theta(text),
        tied=_tied(config, text),
        dtype=dtype if isinstance(dtype, str) else None,
        stop_ids=_stop_ids(folder, config, text),
        weight_names=weight_names,
        tokens=ordinary,
        added_tokens=added,
        chat_template=_chat_template(folder),
    )


def rope_theta(config: Mapping[str, Any]) -> float | None:
    """RoPE base, where transformers 5 or 4 keeps it."""
    parameters = config.get("rope_parameters")
    nested = parameters.get("rope_theta") if isinstance(parameters, Mapping) else None
    value = config.get("rope_theta") if nested is None else nested
    return float(value) if isinstance(value, int | float) else None


def weight_headers(folder: Path) -> dict[str, TensorInfo] | None:
    """Headers of a folder's safetensors files, None where it has none.

    Raises:
        CheckpointError: a shard that the index names is missing, or a file is damaged.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_object(index, CheckpointError).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{index} has no weight_map")
        shards = {str(shard) for shard in weight_map.values()}
        absent = sorted(shard for shard in shards if not (folder / shard).is_file())
        if absent:
            raise CheckpointError(
                f"{folder} lacks {len(absent)} of the {len(shards)} weight files that {index.name} "
                f"names, first {absent[0]}"
            )
    if any(folder.glob("consolidated*.safetensors")):
        # Mistral's own format beside or instead of Hugging Face's: the same tensors, twice or
        # renamed.
        return None
    return read_headers(folder) if any(folder.glob("*.safetensors")) else None


def _tied(config: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    outer = config.get("tie_word_embeddings")
    if OUTER_TIE_ARCHITECTURES.intersection(architectures(config)):
        return bool(outer)
    return bool(text.get("tie_word_embeddings", outer))


def _stop_ids(folder: Path, config: Mapping[str, Any], text: Mapping[str, Any]) -> frozenset[int]:
    generation = folder / "generation_config.json"
    sources = [config, text] + (
        [read_object(generation, CheckpointError)] if generation.is_file() else []
    )
    ids: set[int] = set()
    for source in sources:
        value = source.get("eos_token_id")
        ids.update(i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int))
    return frozenset(ids)


def _tokens(folder: Path) -> tuple[dict[int, str] | None, dict[int, str]]:
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None, {}
    content = read_object(file, CheckpointError)
    listed, model = content.get("added_tokens") or [], content.get("model")
    if not isinstance(listed, list) or not isinstance(model, dict):
        raise CheckpointError(f"{file} is not a tokenizer of the tokenizers library")
    added = {
        token["id"]: str(token.get("content", ""))
        for token in listed
        if isinstance(token, dict) and isinstance(token.get("id"), int)
    }
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):  # BPE, WordPiece, WordLevel: text -> id
        return {i: text for text, i in vocabulary.items() if i not in added}, added
    if isinstance(vocabulary, list):  # Unigram: [text, score] in order of the ids
        return {i: str(entry) for i, entry in enumerate(vocabulary) if i not in added}, added
    return None, added


def _chat_template(folder: Path) -> str:
    template = folder / "chat_template.jinja"
    if template.is_file():
        return template.read_text(encoding="utf-8", errors="replace")
    settings = folder / "tokenizer_config.json"
    value = (
        read_object(settings, CheckpointError).get("chat_template") if settings.is_file() else None
    )
    return value if isinstance(value, str) else json.dumps(value or "")
