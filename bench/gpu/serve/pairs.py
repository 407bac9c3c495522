"""The pairs that are measured: what a server needs, what a report says, and what is asked."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoTokenizer

from bench.gpu.serve.options import Options
from bench.gpu.serve.questions import QUESTIONS
from dflash_sglang import zoo
from dflash_sglang.preflight.pair.locate import Where, locate
from dflash_sglang.preflight.pair.verifier import text_section
from launch.comparison import choose_prompts, pair_args
from launch.devices import OWN, Device

# Sampling of a model that publishes none: what Qwen3 recommends, filters included, because filters
# go through other kernels than temperature alone.
SAMPLING = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
GREEDY = {"temperature": 0.0}
# What a report says of a model: its shape, and nothing that names it.
FACTS = (
    *("architectures", "num_hidden_layers", "hidden_size", "head_dim", "num_attention_heads"),
    *("num_key_value_heads", "num_experts", "num_experts_per_tok", "vocab_size", "dtype"),
    *("torch_dtype", "linear_key_head_dim", "linear_value_head_dim", "block_size", "layer_types"),
)


class PairError(RuntimeError):
    """A model that cannot be found or read."""


class Pair(NamedTuple):
    """A verifier, its drafter, and the requests."""

    name: str
    verifier: str
    drafter: str
    device: Device
    hybrid: bool  # the verifier has recurrent layers
    experts: bool  # and a mixture of experts
    private: bool  # a model of the user's
    args: tuple[str, ...]  # flags of every server
    prompts: Sequence[Sequence[int]]  # token ids, in the model's chat format
    sampling: Mapping[str, float]  # the model's default
    facts: Mapping[str, Any]  # for the report


def embedded_pair(name: str, device: Device) -> Pair:
    """An embedded pair with its held-out prompts."""
    verifier, drafter = zoo.path(name)
    tokenizer = AutoTokenizer.from_pretrained(verifier)
    texts = [prompt.text for prompt in choose_prompts(name)]
    config = read_config(verifier)
    return Pair(
        name=name,
        verifier=str(verifier),
        drafter=str(drafter),
        device=device,
        hybrid=is_hybrid(config),
        experts=has_experts(config),
        private=False,
        args=(),  # by the highest concurrency instead: `limits`
        prompts=[tokenizer.encode(text, add_special_tokens=False) for text in texts],
        sampling=SAMPLING,
        facts=facts_of(name, config, read_config(drafter), SAMPLING),
    )


def own_pair(options: Options) -> Pair:
    """The user's pair, with questions of the user's or ours.

    Raises:
        PairError: a model is not there or has no readable configuration.
    """
    assert options.model is not None
    assert options.drafter is not None
    verifier, drafter = folder_of(options.model, "MODEL"), folder_of(options.drafter, "DRAFTER")
    config, sampling = read_config(verifier), read_sampling(verifier)
    name = options.name or Path(options.model).name
    questions = QUESTIONS
    if options.prompts is not None:
        lines = options.prompts.read_text(encoding="utf-8").splitlines()
        questions = tuple(line for line in lines if line.strip())
        if not questions:
            raise PairError(f"--prompts {options.prompts}: no question in it; give one a line")
    return Pair(
        name=name,
        verifier=options.model,
        drafter=options.drafter,
        device=OWN,
        hybrid=is_hybrid(config),
        experts=has_experts(config),
        private=True,
        args=("--tp-size", str(options.tp), *options.server_flags),
        prompts=in_chat_format(verifier, questions),
        sampling=sampling,
        facts=facts_of(name, config, read_config(drafter), sampling),
    )


def limits(pair: Pair, most: int) -> list[str]:
    """Flags that all servers of a pair share; a user's model has SGLang's own limits."""
    return list(pair.args) if pair.private else pair_args(pair.name, most, pair.device)


def folder_of(given: str, role: str) -> Path:
    """The model's small files: its folder, or the hub's, fetched if they are not here."""
    place = locate(given)
    if place.folder is not None:
        return place.folder
    if place.where is Where.MISSING:
        raise PairError(f"{role} {given}: no such folder; give a folder or a hub name (owner/name)")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(given, allow_patterns=["*.json", "*.jinja", "*.txt"]))
    except Exception as problem:
        raise PairError(
            f"{role} {given}: it could not be fetched ({problem}); give a folder, or set HF_TOKEN "
            "for a model that needs one"
        ) from problem


def read_config(folder: Path) -> dict[str, Any]:
    """The model's configuration."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise PairError(f"{folder}: no readable config.json ({problem})") from problem
    return config


def read_sampling(folder: Path) -> dict[str, float]:
    """What SGLang's OpenAI endpoints sample with by default: the model's own recommendation."""
    file = folder / "generation_config.json"
    published = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    found = {name: published[name] for name in names if published.get(name) is not None}
    return found if found.get("temperature") else dict(SAMPLING)


def is_hybrid(config: Mapping[str, Any]) -> bool:
    """Whether some layers have a state instead of a KV cache."""
    text = text_section(config)
    kinds = text.get("layer_types") or ()
    return "linear_attention" in kinds or "full_attention_interval" in text


def has_experts(config: Mapping[str, Any]) -> bool:
    """Whether the verifier is a mixture of experts, by the names that their number has."""
    text = text_section(config)
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    return any(text.get(name) for name in names)


def facts_of(
    name: str,
    verifier: Mapping[str, Any],
    drafter: Mapping[str, Any],
    sampling: Mapping[str, float],
) -> dict[str, Any]:
    """What the report says of a pair."""

    def shape(config: Mapping[str, Any]) -> dict[str, Any]:
        text = {**config, **text_section(config)}
        found = {key: text[key] for key in FACTS if key in text}
        if "layer_types" in found:
            kinds = list(found["layer_types"])
            found["layer_types"] = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
        return found

    return {
        "name": name,
        "verifier": shape(verifier),
        "drafter": shape(drafter),
        "default_sampling": dict(sampling),
    }


def in_chat_format(folder: Path, questions: Sequence[str]) -> list[list[int]]:
    """Token ids of the questions in the model's chat template; plain text without one."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as problem:
        raise PairError(f"{folder}: its tokenizer cannot be read ({problem})") from problem

    def encode(question: str) -> list[int]:
        if tokenizer.chat_template is None:
            return list(tokenizer.encode(question))
        message = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        return list(tokenizer.encode(text, add_special_tokens=False))

    return [encode(question) for question in questions]
