"""Telling draft heads apart: what is ours, what goes to SGLang's worker, what neither serves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from dflash_sglang.preflight.pair import HeadFamily, ServedBy, check_pair, head_family
from tests.support import public_pairs
from tests.support.pair_builder import small_pair


def _plain(**fields: Any) -> dict[str, Any]:
    return small_pair().draft | fields


def _nested(**fields: Any) -> dict[str, Any]:
    draft = small_pair().draft
    return draft | {"dflash_config": draft["dflash_config"] | fields}


HEADS: tuple[tuple[HeadFamily, ServedBy, dict[str, Any], Iterable[str]], ...] = (
    (HeadFamily.PLAIN, ServedBy.OURS, _plain(), ("fc.weight",)),
    (HeadFamily.PLAIN, ServedBy.OURS, _plain(tie_word_embeddings=True), ()),
    (HeadFamily.PLAIN, ServedBy.OURS, _plain(draft_vocab_size=1024), ()),  # the whole vocabulary
    (HeadFamily.PLAIN, ServedBy.OURS, _plain(markov_rank=0), ()),  # switched off
    (HeadFamily.PLAIN, ServedBy.OURS, _nested(sample_from_anchor=False), ()),
    (HeadFamily.DFLASH2, ServedBy.SGLANG, public_pairs.dflash2(), ()),
    (HeadFamily.DFLASH2, ServedBy.SGLANG, _nested(selector_rank=256, selector_top_k=16), ()),
    # A configuration that lost the field still has the tensors.
    (HeadFamily.DFLASH2, ServedBy.SGLANG, _plain(), ("candidate_selector.successor_codebook",)),
    (
        HeadFamily.DFLASH2,
        ServedBy.SGLANG,
        _plain(),
        ("model.candidate_selector.successor_codebook",),
    ),
    (HeadFamily.DOMINO, ServedBy.SGLANG, _nested(projector_type="domino"), ()),
    (HeadFamily.DOMINO, ServedBy.SGLANG, _plain(), ("prefix_gru.weight_ih_l0",)),
    (HeadFamily.LILICORR, ServedBy.SGLANG, _plain(architectures=["LiLiCorrDraftModel"]), ()),
    (HeadFamily.LILICORR, ServedBy.SGLANG, _nested(lilicorr_candidate_topk=16), ()),
    (HeadFamily.LILICORR, ServedBy.SGLANG, _plain(), ("lilicorr.slot_embedding",)),
    (
        HeadFamily.NEMOTRON,
        ServedBy.SGLANG,
        _plain(has_embed_tokens=True, quantization_config={"quant_algo": "W4A16_NVFP4"}),
        (),
    ),
    (HeadFamily.LAGUNA, ServedBy.SGLANG, _plain(architectures=["DFlashLagunaForCausalLM"]), ()),
    (HeadFamily.LAGUNA, ServedBy.SGLANG, _plain(), ("aux_hidden_norms.0.weight",)),
    (HeadFamily.MUSE, ServedBy.SGLANG, public_pairs.muse_assistant(), ()),
    (HeadFamily.VARIANT, ServedBy.SGLANG, _nested(conv_kernel_size=2, conv_group_size=16), ()),
    (HeadFamily.VARIANT, ServedBy.SGLANG, _nested(attention_sink_bias=True), ()),
    (HeadFamily.VARIANT, ServedBy.SGLANG, _nested(attention_value_scale=0.5), ()),
    (HeadFamily.VARIANT, ServedBy.SGLANG, _plain(use_gemma_norm=True), ()),
    (HeadFamily.VARIANT, ServedBy.SGLANG, _plain(hidden_act="swigluoai"), ()),
    (HeadFamily.VARIANT, ServedBy.SGLANG, _plain(), ("layers.0.attention_conv.base_kernel",)),
    (
        HeadFamily.QUANTIZED,
        ServedBy.SGLANG,
        _plain(quantization_config={"quant_method": "fp8"}),
        (),
    ),
    (HeadFamily.ANCHOR_FIRST, ServedBy.UNSUPPORTED, _nested(sample_from_anchor=True), ()),
    # Anchor-first wins over a family that SGLang serves: it would be served one position off.
    (
        HeadFamily.ANCHOR_FIRST,
        ServedBy.UNSUPPORTED,
        _nested(sample_from_anchor=True, selector_rank=2),
        (),
    ),
    (HeadFamily.DSPARK, ServedBy.UNSUPPORTED, _plain(architectures=["Qwen3DSparkModel"]), ()),
    (HeadFamily.DSPARK, ServedBy.UNSUPPORTED, _plain(), ("markov_head.weight",)),
    (HeadFamily.EAGLE, ServedBy.UNSUPPORTED, _plain(architectures=["LlamaForCausalLMEagle3"]), ()),
    (HeadFamily.REDUCED_VOCABULARY, ServedBy.UNSUPPORTED, _plain(draft_vocab_size=512), ()),
    (
        HeadFamily.REDUCED_VOCABULARY,
        ServedBy.UNSUPPORTED,
        _plain(),
        ("d2t", "t2d", "lm_head.weight"),
    ),
    (HeadFamily.SPECULATORS, ServedBy.UNSUPPORTED, _plain(transformer_layer_config={}), ()),
    (HeadFamily.UNKNOWN, ServedBy.UNSUPPORTED, _plain(architectures=["Qwen3ForCausalLM"]), ()),
    (HeadFamily.UNKNOWN, ServedBy.UNSUPPORTED, _plain(architectures="DFlashDraftModel"), ()),
    (HeadFamily.UNKNOWN, ServedBy.UNSUPPORTED, {}, ()),
)


@pytest.mark.parametrize(
    ("family", "server", "config", "names"), HEADS, ids=lambda value: str(value)[:40]
)
def test_head_family(
    family: HeadFamily, server: ServedBy, config: dict[str, Any], names: Iterable[str]
) -> None:
    assert head_family(config, tuple(names)) is family
    assert family.served_by is server


def test_every_layout_is_told_apart() -> None:
    assert {row[0] for row in HEADS} == set(HeadFamily)


@pytest.mark.parametrize("make", public_pairs.PLAIN, ids=lambda make: make.__name__)
def test_published_plain_heads_are_ours(make: Callable[[], Any]) -> None:
    assert head_family(make().draft, tuple(make().draft_tensors)) is HeadFamily.PLAIN


def test_a_head_for_the_builtin_worker_is_checked_where_the_families_agree(tmp_path: Path) -> None:
    """sglang 37475: Qwen3.8-27B-DFlash2 without its taps was served with guessed ones."""
    pair = small_pair()
    pair.dflash.update(selector_rank=2, selector_top_k=2)
    verifier, draft = pair.write(tmp_path / "good")
    report = check_pair(verifier, draft)
    assert report.head_family is HeadFamily.DFLASH2
    assert report.ok
    assert any("SGLang's own worker" in text for text in report.unchecked)
    del pair.dflash["target_layer_ids"]
    bad = check_pair(*pair.write(tmp_path / "bad"))
    assert [finding.code for finding in bad.errors] == ["taps_missing"]
