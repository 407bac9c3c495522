"""The on-disk format of a plain DFlash draft head: its configuration, tensor names and shapes.

A plain head (Chen et al., *DFlash: Block Diffusion for Flash Speculative Decoding*) is a folder
with a Qwen3-style ``config.json`` and safetensors weights. It has no embedding and no LM head of
its own; both come from the verifier. Reading is strict: what is not understood is an error, never
a default. Nothing here needs torch, so a pair can be checked from the safetensors headers alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from dflash_sglang.errors import PairError
from dflash_sglang.json_values import as_int, read_object

FULL = "full_attention"
SLIDING = "sliding_attention"

# Every key of `dflash_config` a plain head may carry. Another key belongs to another head family or
# to a newer layout whose meaning is unknown here.
_DFLASH_KEYS = frozenset(
    {"target_layer_ids", "mask_token_id", "mask_token", "block_size", "num_target_layers"}
)
# Top-level settings that a plain head leaves at these values; others change the tensors or the
# arithmetic.
_PLAIN_VALUES: dict[str, tuple[Any, ...]] = {
    "projector_type": (None,),
    "markov_rank": (None, 0),
    "markov_head_type": (None,),
    # The anchor's own position would predict the first draft: every position shifts by one.
    "sample_from_anchor": (None, False),
    "has_embed_tokens": (None, False),
    "has_lm_head": (None, False),
    "use_gemma_norm": (None, False),
    "hidden_act": (None, "silu"),
    "rope_is_neox_style": (None, True),
    "is_neox_style": (None, True),
}
# What the messages of safetensors mean for somebody who fetched or wrote a checkpoint.
_DAMAGE = (
    ("not fully covered", "is truncated, or longer than its header says"),
    ("invalid header length", "has a malformed safetensors header, or is cut off inside it"),
    ("JSON in header", "has a malformed safetensors header"),
    ("header too", "is not a safetensors file"),
)


class CheckpointError(PairError):
    """A draft checkpoint that is damaged, incomplete or contradicts itself."""


class OtherHeadError(CheckpointError):
    """A draft checkpoint of another head family, or with an anchor-first layout."""


class TensorInfo(NamedTuple):
    """One entry of a safetensors header."""

    dtype: str  # safetensors name, such as "BF16"
    shape: tuple[int, ...]


@dataclass(frozen=True)
class DraftConfig:
    """What defines a plain DFlash head. `block_size` counts the anchor."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int  # leading dimensions of a head that are rotated
    vocab_size: int
    block_size: int
    target_layer_ids: tuple[int, ...]  # verifier layers whose outputs are tapped, 0-based
    mask_token_id: int
    num_target_layers: int | None  # verifier depth the head was trained for, if stated
    rope_theta: float
    rope_type: str  # "default", or a scaled variant such as "yarn"
    rms_norm_eps: float
    max_position_embeddings: int
    attention_bias: bool
    layer_types: tuple[str, ...]  # FULL or SLIDING, one a layer
    layer_causal: tuple[bool, ...]  # whether a block position attends to no later one of its block
    sliding_window: int | None  # positions a sliding layer looks back, itself included

    @property
    def context_size(self) -> int:
        """Width of the tapped hidden states, concatenated: the input of `fc`."""
        return len(self.target_layer_ids) * self.hidden_size

    def window_of(self, layer: int) -> int | None:
        """Attention window of one layer, in positions; None for a full-attention layer."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None


def load_config(directory: Path) -> DraftConfig:
    """Read `directory`/config.json.

    Raises:
        CheckpointError: the file is missing, is not JSON, or does not describe a usable plain head.
        OtherHeadError: the checkpoint belongs to another head family.
    """
    return parse_config(read_object(Path(directory) / "config.json", CheckpointError))


def parse_config(raw: Mapping[str, Any]) -> DraftConfig:
    """Turn the content of a draft's config.json into a `DraftConfig`; errors as `load_config`."""
    dflash = _dflash_section(raw)
    num_layers = _positive(raw, "num_hidden_layers")
    num_heads = _positive(raw, "num_attention_heads")
    head_dim = _positive(raw, "head_dim")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rotary_share = _number(rope, raw, "partial_rotary_factor", 1.0)
    num_target_layers = dflash.get("num_target_layers", raw.get("num_target_layers"))
    layer_types = tuple(raw.get("layer_types") or (FULL,) * num_layers)
    config = DraftConfig(
        hidden_size=_positive(raw, "hidden_size"),
        intermediate_size=_positive(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_positive(raw, "num_key_value_heads"),
        head_dim=head_dim,
        rotary_dim=int(rope.get("rope_dim", head_dim * rotary_share)),
        vocab_size=_positive(raw, "vocab_size"),
        block_size=_positive(dflash if "block_size" in dflash else raw, "block_size"),
        target_layer_ids=_layer_ids(dflash),
        mask_token_id=_mask_token_id(dflash),
        num_target_layers=None if num_target_layers is None else int(num_target_layers),
        rope_theta=_number(rope, raw, "rope_theta", None),
        rope_type=str(rope.get("rope_type", rope.get("type", "default"))),
        rms_norm_eps=_number({}, raw, "rms_norm_eps", None),
        max_position_embeddings=_positive(raw, "max_position_embeddings"),
        attention_bias=bool(raw.get("attention_bias", False)),
        layer_types=layer_types,
        # SGLang's rule, unless the checkpoint says otherwise: full layers see the whole block,
        # sliding ones are causal.
        layer_causal=tuple(bool(raw.get("is_causal", kind == SLIDING)) for kind in layer_types),
        sliding_window=_positive(raw, "sliding_window") if SLIDING in layer_types else None,
    )
    _check_consistent(config)
    return config


def expected_tensors(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a plain head, name -> shape; a checkpoint has exactly these."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    tensors: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, config.context_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    per_layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "self_attn.q_norm.weight": (config.head_dim,),
        "self_attn.k_norm.weight": (config.head_dim,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.attention_bias:
        widths = {"q_proj": q, "k_proj": kv, "v_proj": kv, "o_proj": hidden}
        per_layer |= {f"self_attn.{name}.bias": (width,) for name, width in widths.items()}
    for layer in range(config.num_layers):
        tensors |= {f"layers.{layer}.{name}": shape for name, shape in per_layer.items()}
    return tensors


def read_headers(directory: Path) -> dict[str, TensorInfo]:
    """Names, dtypes and shapes of all tensors under `directory`, without reading a weight.

    Raises:
        CheckpointError: no safetensors file, a truncated or malformed one, or a name stored twice.
    """
    files = sorted(Path(directory).glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{directory} has no *.safetensors file")
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for name, info in _read_header(file).items():
            if name in tensors:
                raise CheckpointError(
                    f"{directory} stores tensor {name} twice (second time in {file.name})"
                )
            tensors[name] = info
    return tensors


def tensor_problems(config: DraftConfig, found: Mapping[str, TensorInfo]) -> list[str]:
    """One line for each missing, unexpected or misshapen tensor; none when all fit `config`."""
    expected = expected_tensors(config)
    problems = [
        f"missing tensor {name} {shape}" for name, shape in expected.items() if name not in found
    ]
    problems += [
        f"unexpected tensor {name} {found[name].shape}" for name in found if name not in expected
    ]
    problems += [
        f"tensor {name} has shape {found[name].shape}, config.json implies {shape}"
        for name, shape in expected.items()
        if name in found and found[name].shape != shape
    ]
    return problems


def _read_header(file: Path) -> dict[str, TensorInfo]:
    try:
        with safe_open(file, framework="np") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
            return {
                name: TensorInfo(part.get_dtype(), tuple(part.get_shape()))
                for name, part in slices.items()
            }
    except SafetensorError as error:
        problem = next((p for mark, p in _DAMAGE if mark in str(error)), "cannot be read")
        raise CheckpointError(f"{file} {problem} ({error})") from error


def _dflash_section(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    architectures = list(raw.get("architectures") or ())
    if architectures != ["DFlashDraftModel"]:
        raise OtherHeadError(
            f'config.json has architectures {architectures}, a plain head has ["DFlashDraftModel"]'
        )
    for key, plain in _PLAIN_VALUES.items():
        if raw.get(key) not in plain:
            raise OtherHeadError(f"config.json has {key} {raw[key]!r}: not a plain DFlash head")
    dflash = raw.get("dflash_config")
    if not isinstance(dflash, Mapping):
        raise CheckpointError("config.json has no dflash_config section")
    unknown = [
        key for key in sorted(set(dflash) - _DFLASH_KEYS) if dflash[key] not in (None, False, 0)
    ]
    if unknown:
        raise OtherHeadError(f"dflash_config has keys no plain head has: {', '.join(unknown)}")
    return dflash


def _check_consistent(config: DraftConfig) -> None:
    if config.block_size < 2:
        raise CheckpointError(
            f"block_size must be at least 2 (the anchor and one draft), got {config.block_size}"
        )
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"num_attention_heads {config.num_heads} is not a multiple of "
            f"num_key_value_heads {config.num_kv_heads}"
        )
    if not 0 < config.rotary_dim <= config.head_dim or config.rotary_dim % 2:
        raise CheckpointError(
            f"{config.rotary_dim} rotary dimensions do not fit head_dim {config.head_dim}"
        )
    if len(config.layer_types) != config.num_layers or set(config.layer_types) - {FULL, SLIDING}:
        raise CheckpointError(
            f"layer_types must name {config.num_layers} layers as {FULL} or {SLIDING}"
        )
    if not 0 <= config.mask_token_id < config.vocab_size:
        raise CheckpointError(
            f"mask_token_id {config.mask_token_id} is outside the vocabulary of {config.vocab_size}"
        )
    depth = config.num_target_layers
    if depth is not None and max(config.target_layer_ids) >= depth - 1:
        # The last layer's output leaves the verifier only after its final norm.
        raise CheckpointError(
            f"target_layer_ids {config.target_layer_ids} must all be below {depth - 1}, "
            "the last layer"
        )


def _positive(section: Mapping[str, Any], key: str) -> int:
    value = as_int(section.get(key))
    if value is None or value < 1:
        raise CheckpointError(
            f"config.json needs {key} as a positive integer, got {section.get(key)!r}"
        )
    return value


def _number(
    first: Mapping[str, Any], second: Mapping[str, Any], key: str, default: float | None
) -> float:
    value = first.get(key, second.get(key, default))
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise CheckpointError(f"config.json needs {key} as a positive number, got {value!r}")
    return float(value)


def _layer_ids(dflash: Mapping[str, Any]) -> tuple[int, ...]:
    ids = dflash.get("target_layer_ids")
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and i >= 0 for i in ids):
        raise CheckpointError(
            f"dflash_config needs target_layer_ids as a list of layer indices, got {ids!r}"
        )
    if sorted(set(ids)) != ids:
        raise CheckpointError(f"target_layer_ids must be increasing and without repeats, got {ids}")
    return tuple(ids)


def _mask_token_id(dflash: Mapping[str, Any]) -> int:
    value = as_int(dflash.get("mask_token_id"))
    if value is None:
        raise CheckpointError(
            f"dflash_config needs mask_token_id as an integer, got {dflash.get('mask_token_id')!r}"
        )
    return value
