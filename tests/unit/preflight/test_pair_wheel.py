"""What the pair check claims about SGLang and transformers, against what is installed."""

from __future__ import annotations

import ast
import importlib.util
import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from dflash_sglang.preflight.pair.architectures import (
    CAPTURING_ARCHITECTURES,
    OUTER_TIE_ARCHITECTURES,
    OWN_HEAD_ARCHITECTURES,
)
from tests.support.pair_builder import small_pair

METHOD = "set_dflash_layers_to_capture"
BASE_WRAPPER = "Qwen3VLForConditionalGeneration"
# Entry classes that are drafters or heads of other algorithms, never verifiers.
_NOT_VERIFIERS = ("NextN", "MTP", "Eagle", "Eagle3", "SequenceClassification")
_NOT_VERIFIER_NAMES = {
    "Gemma4AssistantForCausalLM",
    "Gemma4UnifiedAssistantForCausalLM",
    "Lfm2BidirectionalModel",  # an encoder
}
# A facade that hands calls on to the class of its version.
_FACADE = {"MiniCPMV", "MiniCPMV4_6ForConditionalGeneration", "MiniCPMV4_7ForConditionalGeneration"}


class Model(NamedTuple):
    bases: tuple[str, ...]
    captures: bool
    source: str


@cache
def _models() -> tuple[dict[str, Model], frozenset[str]]:
    """Classes of sglang/srt/models by name, and the names of the entry classes."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(next(iter(spec.submodule_search_locations))) / "srt" / "models"
    classes: dict[str, Model] = {}
    entries: set[str] = set()
    for file in sorted(folder.glob("*.py")):
        text = file.read_text()
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef):
                bases = tuple(base.id for base in node.bases if isinstance(base, ast.Name))
                captures = any(
                    isinstance(n, ast.FunctionDef) and n.name == METHOD for n in node.body
                )
                classes[node.name] = Model(
                    bases, captures, ast.get_source_segment(text, node) or ""
                )
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EntryClass":
                entries |= {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
    return classes, frozenset(entries)


def _captures(name: str) -> bool:
    model = _models()[0].get(name)
    return model is not None and (model.captures or any(map(_captures, model.bases)))


@pytest.mark.slow
def test_listed_architectures_capture_hidden_states() -> None:
    assert {name for name in CAPTURING_ARCHITECTURES - _FACADE if not _captures(name)} == set()
    assert _captures("MiniCPMV4_6")


@pytest.mark.slow
def test_no_capturing_architecture_is_refused() -> None:
    """One that is missing from the table would be refused although SGLang serves it."""
    found = {name for name in _models()[1] if _captures(name)}
    verifiers = {name for name in found if not name.endswith(_NOT_VERIFIERS)} - _NOT_VERIFIER_NAMES
    assert verifiers - CAPTURING_ARCHITECTURES == set()


@pytest.mark.parametrize("name", sorted(OWN_HEAD_ARCHITECTURES))
def test_architectures_that_never_tie(name: str) -> None:
    """They build a head unconditionally, so a tied checkpoint leaves it empty."""
    source = _models()[0][name].source
    assert "self.lm_head = ParallelLMHead(" in source
    assert "tie_word_embeddings" not in source


def test_a_class_that_ties_is_not_listed() -> None:
    """The negative control of the test above."""
    assert "tie_word_embeddings" in _models()[0]["Qwen3ForCausalLM"].source
    assert "Qwen3ForCausalLM" not in OWN_HEAD_ARCHITECTURES


@pytest.mark.parametrize("name", sorted(OUTER_TIE_ARCHITECTURES))
def test_wrappers_that_tie_as_the_outer_configuration_says(name: str) -> None:
    """One constructor takes its word over the text section's."""
    classes = _models()[0]
    assert BASE_WRAPPER in (name, *classes[name].bases)
    assert "self.config.tie_word_embeddings = config.tie_word_embeddings" in (
        classes[BASE_WRAPPER].source
    )


def _config(tmp_path: Path, **fields: object) -> object:
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(json.dumps(small_pair().draft | fields))
    return AutoConfig.from_pretrained(tmp_path)


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}


def test_a_window_that_is_switched_off_stops_sglang(tmp_path: Path) -> None:
    """Why window_unused is an error: the layers are sliding and their window is gone."""
    from sglang.srt.speculative.dflash_utils import get_dflash_attention_sliding_window_size

    with pytest.raises(ValueError, match="sliding_window"):
        get_dflash_attention_sliding_window_size(_config(tmp_path, **SLIDING))
    kept = _config(tmp_path, **SLIDING, use_sliding_window=True)
    assert get_dflash_attention_sliding_window_size(kept) == 31


def test_a_partial_factor_is_served_by_where_it_stands(tmp_path: Path) -> None:
    """Why rotary_dim is an error: SGLang's draft attention reads the top level only."""
    top: Any = _config(tmp_path, partial_rotary_factor=0.25)
    assert top.partial_rotary_factor == 0.25
    rope = {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.25}
    nested = _config(tmp_path, rope_parameters=rope)
    assert not hasattr(nested, "partial_rotary_factor")


def test_missing_rope_theta_becomes_ten_thousand(tmp_path: Path) -> None:
    draft = small_pair().draft
    del draft["rope_theta"]
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(json.dumps(draft))
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters["rope_theta"] == 10000.0


def test_missing_taps_are_guessed_by_sglang() -> None:
    """Why taps_missing is an error: the guess for Qwen3.8-27B-DFlash2 is another list."""
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config

    config = {"num_hidden_layers": 5, "dflash_config": {"mask_token_id": 248070}}
    parsed = parse_dflash_draft_config(draft_hf_config=config)
    guessed = parsed.resolve_target_layer_ids(target_num_layers=64)
    assert guessed == [1, 16, 31, 46, 61]  # trained with [5, 19, 33, 47, 61]


def test_sglang_accepts_the_last_layer_in_its_range_check() -> None:
    """Why taps_last is ours to find."""
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config

    config = {"num_hidden_layers": 1, "dflash_config": {"target_layer_ids": [5]}}
    parsed = parse_dflash_draft_config(draft_hf_config=config)
    assert parsed.resolve_target_layer_ids(target_num_layers=6) == [5]


def test_the_head_families_are_told_as_sglang_tells_them() -> None:
    from sglang.srt.speculative.dflash_utils import is_nemotron_35_draft_config

    from dflash_sglang.preflight.pair import HeadFamily, head_family

    config = {
        "architectures": ["DFlashDraftModel"],
        "has_embed_tokens": True,
        "quantization_config": {"quant_algo": "W4A16_NVFP4"},
        "eagle_aux_hidden_state_layer_ids": [2, 4],
        "dflash_config": {"target_layer_ids": [1, 3], "sample_from_anchor": False},
    }
    assert is_nemotron_35_draft_config(SimpleNamespace(**config))
    assert head_family(config) is HeadFamily.NEMOTRON
