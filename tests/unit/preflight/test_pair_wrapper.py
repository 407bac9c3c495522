"""The pair check on verifiers that keep their language model's configuration in a section."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_sglang.preflight.pair import check_pair
from tests.support.pair_builder import PairFiles, small_pair
from tests.support.vision_pair import vision_pair

HEAD = "lm_head.weight"


def wrapped_pair() -> PairFiles:
    """The small pair's verifier under the class and the names of a multimodal wrapper."""
    pair = small_pair()
    text = {name: value for name, value in pair.verifier.items() if name != "architectures"}
    pair.verifier = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "text_config": text,
        # As of another model: whoever reads these for the language model's is found out.
        "vision_config": {"hidden_size": 32, "num_hidden_layers": 2},
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "vocab_size": 7,
        "tie_word_embeddings": False,
    }
    table = pair.verifier_tensors.pop("model.embed_tokens.weight")
    pair.verifier_tensors["model.language_model.embed_tokens.weight"] = table
    return pair


def codes(pair: PairFiles, folder: Path) -> list[str]:
    return [finding.code for finding in check_pair(*pair.write(folder)).findings]


def test_a_wrapped_pair_fits(tmp_path: Path) -> None:
    assert codes(wrapped_pair(), tmp_path) == []


def test_the_hybrid_pair_behind_a_vision_tower_fits(tmp_path: Path) -> None:
    """The pair that tests/server/test_vision.py serves, with its weights and its tokenizer."""
    report = check_pair(*vision_pair(tmp_path))
    assert report.findings == ()
    assert report.unchecked == ()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda text: text.update(num_hidden_layers=5), "taps_last"),
        (lambda text: text.update(num_hidden_layers=36), "target_depth"),
        (lambda text: text.update(hidden_size=128), "hidden_size"),
        (lambda text: text.update(vocab_size=2048), "vocab_size"),
        (lambda text: text.update(eos_token_id=[2, 3]), "mask_stop"),
        (lambda text: text["rope_parameters"].update(rope_theta=5e5), "rope_theta"),
    ],
)
def test_faults_of_the_text_section_are_found(
    change: Callable[[dict[str, object]], object], code: str, tmp_path: Path
) -> None:
    pair = wrapped_pair()
    change(pair.text)
    assert code in codes(pair, tmp_path)


@pytest.mark.parametrize("outer", [True, False, None])
@pytest.mark.parametrize("inner", [True, False])
def test_a_wrapper_ties_as_its_outer_configuration_says(
    outer: bool | None, inner: bool, tmp_path: Path
) -> None:
    """The section's word would pass a checkpoint that answers token 0 for ever, or refuse one."""
    pair = wrapped_pair()
    del pair.verifier_tensors[HEAD]
    pair.text["tie_word_embeddings"] = inner
    pair.verifier["tie_word_embeddings"] = outer
    assert codes(pair, tmp_path) == ([] if outer else ["verifier_head"])
