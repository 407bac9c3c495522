"""Rules for a plain head: the geometry of its own attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dflash_sglang.drafter.checkpoint import FULL, SLIDING
from dflash_sglang.json_values import as_int
from dflash_sglang.preflight.pair.report import Finding, error, warning
from dflash_sglang.preflight.pair.rule import Pair, Rule
from dflash_sglang.preflight.pair.verifier import rope_theta


def heads(pair: Pair) -> Iterator[Finding]:
    """Attention heads must divide, here and over the ranks."""
    count, kv, dim = (
        pair.draft_int(k) for k in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    if count is None or kv is None or dim is None:
        yield error(
            "heads_missing",
            "config.json of the drafter does not say its attention heads",
            f"num_attention_heads {count}, num_key_value_heads {kv}, head_dim {dim}",
            "Add all three; a default would be another model's.",
        )
        return
    if count < 1 or kv < 1 or dim < 1 or count % kv:
        yield error(
            "heads",
            "num_attention_heads must be a multiple of num_key_value_heads",
            f"num_attention_heads {count}, num_key_value_heads {kv}, head_dim {dim}",
            "Correct the drafter's config.json.",
        )
    elif count % pair.tp_size or (kv % pair.tp_size and pair.tp_size % kv):
        yield error(
            "heads_tp",
            "the drafter's heads cannot be split over the ranks",
            f"num_attention_heads {count}, num_key_value_heads {kv}, --tp-size {pair.tp_size}",
            "Choose a --tp-size that divides num_attention_heads and divides or is divided by "
            "num_key_value_heads.",
        )


def rotary(pair: Pair) -> Iterator[Finding]:
    """How much of a head is rotated, and by which base, must be what the head was trained with."""
    rope = pair.draft.get("rope_parameters") or pair.draft.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        yield error(
            "rope_parameters",
            "the drafter's rotary settings must be an object",
            f"rope_parameters {rope!r}",
            "Correct the drafter's config.json.",
        )
        return
    yield from _rotated_width(pair, rope)
    yield from _rotary_base(pair)
    if "mrope_section" in rope and "rope_dim" not in rope:
        yield warning(
            "mrope",
            "the drafter carries the verifier's multimodal rotary sections, but only ever sees "
            "plain positions",
            f"mrope_section {rope['mrope_section']}",
            "Remove mrope_section from the drafter's rope_parameters.",
        )


def _rotated_width(pair: Pair, rope: Mapping[str, Any]) -> Iterator[Finding]:
    dim = pair.draft_int("head_dim")
    factor = pair.draft.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0))
    if "rope_dim" in rope:
        width = as_int(rope["rope_dim"])
        if width is None or width < 1 or width % 2 or (dim is not None and width > dim):
            yield error(
                "rotary_dim",
                "the rotated width does not fit the head",
                f"rope_dim {rope['rope_dim']!r}, head_dim {dim}",
                "Correct rope_parameters.rope_dim: even, at most head_dim.",
            )
    elif factor != 1.0:
        yield error(
            "rotary_dim",
            "the drafter carries partial_rotary_factor, which transformers ignores when it trains "
            "a Qwen3-style head and servers apply or ignore by where it stands",
            f"partial_rotary_factor {factor}, head_dim {dim}",
            "Say the trained width: set rope_parameters.rope_dim (head_dim where the whole head "
            "was rotated) and remove partial_rotary_factor.",
        )


def _rotary_base(pair: Pair) -> Iterator[Finding]:
    base, verifier = rope_theta(pair.draft), pair.verifier.rope_theta
    if base is None:
        yield error(
            "rope_theta",
            "config.json of the drafter has no rope_theta, and transformers would assume 10000",
            "no rope_theta, none in rope_parameters",
            "Add the base the head was trained with.",
        )
    elif verifier is not None and base != verifier:
        yield warning(
            "rope_theta",
            "drafter and verifier rotate by different bases",
            f"rope_theta {base:g}, verifier {verifier:g}",
            "Nothing to do when the head was trained so; published heads share the base.",
        )


def layer_kinds(pair: Pair) -> Iterator[Finding]:
    """Full and sliding layers, and the window that the sliding ones need."""
    draft, layers = pair.draft, pair.draft_int("num_hidden_layers")
    kinds, window = draft.get("layer_types"), as_int(draft.get("sliding_window"))
    used = bool(draft.get("use_sliding_window"))
    if kinds is None:
        if used and window is not None:
            yield warning(
                "layer_types_missing",
                "the drafter has a sliding window but does not name its layers; "
                "transformers then gives it to those from max_window_layers on",
                f"sliding_window {window}, max_window_layers {draft.get('max_window_layers')}",
                f"Add layer_types, one of {FULL} or {SLIDING} a layer.",
            )
        return
    if (
        not isinstance(kinds, list)
        or len(kinds) != layers
        or not all(kind in (FULL, SLIDING) for kind in kinds)
    ):
        yield error(
            "layer_types",
            f"layer_types must name every draft layer as {FULL} or {SLIDING}",
            f"{kinds!r} for num_hidden_layers {layers}",
            "Correct the drafter's config.json.",
        )
        return
    if SLIDING not in kinds:
        return
    block = pair.block_size or pair.draft_int("block_size") or 0
    if window is None:
        yield error(
            "window_missing",
            "sliding layers need a window",
            f"sliding_window {draft.get('sliding_window')!r} with {kinds.count(SLIDING)} sliding "
            "layers",
            "Add sliding_window as the head was trained.",
        )
    elif not used:
        yield error(
            "window_unused",
            "transformers drops sliding_window unless use_sliding_window is true, and SGLang then "
            "finds sliding layers without a window",
            f"sliding_window {window}, use_sliding_window {draft.get('use_sliding_window')!r}",
            "Set use_sliding_window to true.",
        )
    elif window < block:
        yield error(
            "window_small",
            "the window does not cover the block",
            f"sliding_window {window}, block size {block}",
            "Ask for a smaller --speculative-dflash-block-size.",
        )


def context_range(pair: Pair) -> Iterator[Finding]:
    """Past its own range a drafter is not run; the answers stay exact."""
    own, verifier = pair.draft_int("max_position_embeddings"), pair.verifier.max_position_embeddings
    if own is not None and verifier is not None and own < verifier:
        yield warning(
            "context_range",
            "the drafter was made for a shorter context than the verifier's; past it, requests "
            "advance one token a step",
            f"max_position_embeddings {own}, verifier {verifier}",
            f"Serve with --context-length {own} or less, or accept plain speed there.",
        )


def data_type(pair: Pair) -> Iterator[Finding]:
    """A drafter is cast to the server's type; bfloat16 does not fit into float16."""
    own = pair.draft.get("dtype", pair.draft.get("torch_dtype"))
    if own == "bfloat16" and pair.verifier.dtype == "float16":
        yield warning(
            "dtype",
            "a bfloat16 drafter beside a float16 verifier can overflow in the drafter",
            f"drafter {own}, verifier {pair.verifier.dtype}",
            "Serve with --dtype bfloat16 where the GPU has it.",
        )


PLAIN_RULES: tuple[Rule, ...] = (heads, rotary, layer_kinds, context_range, data_type)
