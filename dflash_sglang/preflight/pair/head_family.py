"""Which family a draft head belongs to, by its configuration and tensor names.

SGLang 0.5.23 serves several families under the one name DFLASH. This package serves the plain head;
the others that SGLang's own worker knows are left to it, and what neither serves correctly is
refused. The marks are those SGLang builds its modules by (sglang/srt/models/dflash.py,
models/lilicorr.py, speculative/dflash_utils.py), plus the tensors themselves, because a
configuration that lost a field still has them in its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from typing import Any

Config = Mapping[str, Any]


class ServedBy(StrEnum):
    """Which worker serves a head family."""

    OURS = "dflash_sglang"
    SGLANG = "sglang"
    UNSUPPORTED = "unsupported"


class HeadFamily(StrEnum):
    """Family of a draft head."""

    PLAIN = "plain"
    # Served by SGLang's own worker.
    DFLASH2 = "dflash2"  # candidate selector
    DOMINO = "domino"  # GRU projector
    LILICORR = "lilicorr"  # low-rank correlation head
    NEMOTRON = "nemotron"  # own embedding, NVFP4
    LAGUNA = "laguna"  # gated attention, a norm per tap
    MUSE = "muse"  # MuseGlimmer assistant
    VARIANT = "variant"  # plain forward with extra modules or another norm or activation
    QUANTIZED = "quantized"
    # Not served under the name DFLASH, by either worker.
    ANCHOR_FIRST = "anchor_first"  # the anchor's position predicts: all positions shift by one
    DSPARK = "dspark"
    EAGLE = "eagle"
    REDUCED_VOCABULARY = (
        "reduced_vocabulary"  # own head over a part of the vocabulary, with a d2t table
    )
    SPECULATORS = "speculators"  # configuration in the speculators format
    UNKNOWN = "unknown"  # not a draft head of a known kind

    @property
    def served_by(self) -> ServedBy:
        """Who serves a head of this family."""
        if self is HeadFamily.PLAIN:
            return ServedBy.OURS
        return ServedBy.SGLANG if self in _SGLANG_SERVES else ServedBy.UNSUPPORTED


_SGLANG_SERVES = frozenset(
    {
        HeadFamily.DFLASH2,
        HeadFamily.DOMINO,
        HeadFamily.LILICORR,
        HeadFamily.NEMOTRON,
        HeadFamily.LAGUNA,
        HeadFamily.MUSE,
        HeadFamily.VARIANT,
        HeadFamily.QUANTIZED,
    }
)

PLAIN_ARCHITECTURE = "DFlashDraftModel"
_DFLASH2_ARCHITECTURES = {"DFlash2DraftModel", "DFlash2BeamDraftModel", "MiniMaxDFlash2DraftModel"}


def head_family(config: Config, tensor_names: Collection[str] = ()) -> HeadFamily:
    """Find the family of a draft head.

    Args:
        config: content of the draft checkpoint's config.json.
        tensor_names: names of its tensors, where the headers could be read.

    Returns:
        The first family whose marks are there; refused families come before those that are served,
        so that a shifted or cut-down head is never taken for a served one.
    """
    names = frozenset(name.removeprefix("model.") for name in tensor_names)
    return next(
        (family for family, has_mark in _MARKS if has_mark(config, names)), HeadFamily.UNKNOWN
    )


def dflash_section(config: Config) -> Config:
    """`dflash_config`, or an empty mapping where there is none."""
    section = config.get("dflash_config")
    return section if isinstance(section, Mapping) else {}


def setting(config: Config, key: str) -> Any:
    """A draft setting where SGLang looks for it: `dflash_config` first, then the top level."""
    section = dflash_section(config)
    return section[key] if key in section else config.get(key)


def architectures(config: Config) -> tuple[str, ...]:
    """`architectures` of a configuration; empty where it is missing or malformed."""
    value = config.get("architectures")
    return tuple(str(name) for name in value) if isinstance(value, list) else ()


def _anchor_first(config: Config, names: frozenset[str]) -> bool:
    return bool(setting(config, "sample_from_anchor"))


def _speculators(config: Config, names: frozenset[str]) -> bool:
    return "speculators_model_type" in config or "transformer_layer_config" in config


def _dspark(config: Config, names: frozenset[str]) -> bool:
    return (
        any("DSpark" in name for name in architectures(config))
        or bool(setting(config, "markov_rank"))
        or setting(config, "markov_head_type") is not None
        or _any_starts(names, "markov_head.", "confidence_head.")
    )


def _eagle(config: Config, names: frozenset[str]) -> bool:
    return any("Eagle" in name for name in architectures(config))


def _reduced_vocabulary(config: Config, names: frozenset[str]) -> bool:
    draft, full = setting(config, "draft_vocab_size"), config.get("vocab_size")
    return (draft is not None and draft != full) or bool(names & {"d2t", "t2d"})


def _dflash2(config: Config, names: frozenset[str]) -> bool:
    return (
        bool(_DFLASH2_ARCHITECTURES.intersection(architectures(config)))
        or bool(setting(config, "selector_rank"))
        or _any_starts(names, "candidate_selector.")
    )


def _domino(config: Config, names: frozenset[str]) -> bool:
    marked = (
        setting(config, "projector_type") == "domino"
        or setting(config, "domino_config") is not None
    )
    return marked or _any_starts(names, "prefix_gru.", "embed_proj.")


def _lilicorr(config: Config, names: frozenset[str]) -> bool:
    return (
        "LiLiCorrDraftModel" in architectures(config)
        or any(key.startswith("lilicorr_") for key in (*config, *dflash_section(config)))
        or _any_starts(names, "lilicorr.")
    )


def _nemotron(config: Config, names: frozenset[str]) -> bool:
    quantization = config.get("quantization_config")
    nvfp4 = isinstance(quantization, Mapping) and quantization.get("quant_algo") == "W4A16_NVFP4"
    return bool(config.get("has_embed_tokens")) and not config.get("has_lm_head") and nvfp4


def _laguna(config: Config, names: frozenset[str]) -> bool:
    return "DFlashLagunaForCausalLM" in architectures(config) or _any_starts(
        names, "aux_hidden_norms."
    )


def _muse(config: Config, names: frozenset[str]) -> bool:
    return "MuseGlimmerAssistantModel" in architectures(config)


def _variant(config: Config, names: frozenset[str]) -> bool:
    if PLAIN_ARCHITECTURE not in architectures(config):
        return False
    return (
        bool(setting(config, "conv_kernel_size"))
        or bool(setting(config, "attention_sink_bias"))
        or setting(config, "attention_value_scale") is not None
        or bool(config.get("use_gemma_norm"))
        or config.get("hidden_act", "silu") != "silu"
        or any("_conv." in name or name.endswith("attention_sink_bias") for name in names)
    )


def _quantized(config: Config, names: frozenset[str]) -> bool:
    return (
        PLAIN_ARCHITECTURE in architectures(config)
        and config.get("quantization_config") is not None
    )


def _plain(config: Config, names: frozenset[str]) -> bool:
    return architectures(config) == (PLAIN_ARCHITECTURE,)


def _any_starts(names: frozenset[str], *prefixes: str) -> bool:
    return any(name.startswith(prefixes) for name in names)


_MARKS: tuple[tuple[HeadFamily, Callable[[Config, frozenset[str]], bool]], ...] = (
    (HeadFamily.ANCHOR_FIRST, _anchor_first),
    (HeadFamily.SPECULATORS, _speculators),
    (HeadFamily.DSPARK, _dspark),
    (HeadFamily.EAGLE, _eagle),
    (HeadFamily.REDUCED_VOCABULARY, _reduced_vocabulary),
    (HeadFamily.NEMOTRON, _nemotron),
    (HeadFamily.DFLASH2, _dflash2),
    (HeadFamily.DOMINO, _domino),
    (HeadFamily.LILICORR, _lilicorr),
    (HeadFamily.LAGUNA, _laguna),
    (HeadFamily.MUSE, _muse),
    (HeadFamily.VARIANT, _variant),
    (HeadFamily.QUANTIZED, _quantized),
    (HeadFamily.PLAIN, _plain),
)
