"""Telling draft heads apart: what is ours, what goes to SGLang's worker, what nobody serves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from dflash_sglang.preflight.pair import Layout, Server, check_pair, draft_layout
from tests.support import public_pairs
from tests.support.pair_builder import small_pair


def _plain(**fields: Any) -> dict[str, Any]:
    return small_pair().draft | fields


def _nested(**fields: Any) -> dict[str, Any]:
    draft = small_pair().draft
    return draft | {"dflash_config": draft["dflash_config"] | fields}


LAYOUTS: tuple[tuple[Layout, Server, dict[str, Any], Iterable[str]], ...] = (
    (Layout.PLAIN, Server.OURS, _plain(), ("fc.weight",)),
    (Layout.PLAIN, Server.OURS, _plain(tie_word_embeddings=True), ()),
    (Layout.PLAIN, Server.OURS, _plain(draft_vocab_size=1024), ()),  # the whole vocabulary
    (Layout.PLAIN, Server.OURS, _plain(markov_rank=0), ()),  # switched off
    (Layout.PLAIN, Server.OURS, _nested(sample_from_anchor=False), ()),
    (Layout.DFLASH2, Server.SGLANG, public_pairs.dflash2(), ()),
    (Layout.DFLASH2, Server.SGLANG, _nested(selector_rank=256, selector_top_k=16), ()),
    # A configuration that lost the field still has the tensors.
    (Layout.DFLASH2, Server.SGLANG, _plain(), ("candidate_selector.successor_codebook",)),
    (Layout.DFLASH2, Server.SGLANG, _plain(), ("model.candidate_selector.successor_codebook",)),
    (Layout.DOMINO, Server.SGLANG, _nested(projector_type="domino"), ()),
    (Layout.DOMINO, Server.SGLANG, _plain(), ("prefix_gru.weight_ih_l0",)),
    (Layout.LILICORR, Server.SGLANG, _plain(architectures=["LiLiCorrDraftModel"]), ()),
    (Layout.LILICORR, Server.SGLANG, _nested(lilicorr_candidate_topk=16), ()),
    (Layout.LILICORR, Server.SGLANG, _plain(), ("lilicorr.slot_embedding",)),
    (
        Layout.NEMOTRON,
        Server.SGLANG,
        _plain(has_embed_tokens=True, quantization_config={"quant_algo": "W4A16_NVFP4"}),
        (),
    ),
    (Layout.LAGUNA, Server.SGLANG, _plain(architectures=["DFlashLagunaForCausalLM"]), ()),
    (Layout.LAGUNA, Server.SGLANG, _plain(), ("aux_hidden_norms.0.weight",)),
    (Layout.MUSE, Server.SGLANG, public_pairs.muse_assistant(), ()),
    (Layout.VARIANT, Server.SGLANG, _nested(conv_kernel_size=2, conv_group_size=16), ()),
    (Layout.VARIANT, Server.SGLANG, _nested(attention_sink_bias=True), ()),
    (Layout.VARIANT, Server.SGLANG, _nested(attention_value_scale=0.5), ()),
    (Layout.VARIANT, Server.SGLANG, _plain(use_gemma_norm=True), ()),
    (Layout.VARIANT, Server.SGLANG, _plain(hidden_act="swigluoai"), ()),
    (Layout.VARIANT, Server.SGLANG, _plain(), ("layers.0.attention_conv.base_kernel",)),
    (Layout.QUANTIZED, Server.SGLANG, _plain(quantization_config={"quant_method": "fp8"}), ()),
    (Layout.ANCHOR_FIRST, Server.NOBODY, _nested(sample_from_anchor=True), ()),
    # Anchor-first wins over a family that SGLang serves: it would be served one position off.
    (Layout.ANCHOR_FIRST, Server.NOBODY, _nested(sample_from_anchor=True, selector_rank=2), ()),
    (Layout.DSPARK, Server.NOBODY, _plain(architectures=["Qwen3DSparkModel"]), ()),
    (Layout.DSPARK, Server.NOBODY, _plain(), ("markov_head.weight",)),
    (Layout.EAGLE, Server.NOBODY, _plain(architectures=["LlamaForCausalLMEagle3"]), ()),
    (Layout.REDUCED_VOCABULARY, Server.NOBODY, _plain(draft_vocab_size=512), ()),
    (Layout.REDUCED_VOCABULARY, Server.NOBODY, _plain(), ("d2t", "t2d", "lm_head.weight")),
    (Layout.SPECULATORS, Server.NOBODY, _plain(transformer_layer_config={}), ()),
    (Layout.UNKNOWN, Server.NOBODY, _plain(architectures=["Qwen3ForCausalLM"]), ()),
    (Layout.UNKNOWN, Server.NOBODY, _plain(architectures="DFlashDraftModel"), ()),
    (Layout.UNKNOWN, Server.NOBODY, {}, ()),
)


@pytest.mark.parametrize(
    ("layout", "server", "config", "names"), LAYOUTS, ids=lambda value: str(value)[:40]
)
def test_layout(
    layout: Layout, server: Server, config: dict[str, Any], names: Iterable[str]
) -> None:
    assert draft_layout(config, tuple(names)) is layout
    assert layout.server is server


def test_every_layout_is_told_apart() -> None:
    assert {row[0] for row in LAYOUTS} == set(Layout)


@pytest.mark.parametrize("make", public_pairs.PLAIN, ids=lambda make: make.__name__)
def test_published_plain_heads_are_ours(make: Callable[[], Any]) -> None:
    assert draft_layout(make().draft, tuple(make().draft_tensors)) is Layout.PLAIN


def test_a_head_for_the_builtin_worker_is_checked_where_the_families_agree(tmp_path: Path) -> None:
    """sglang 37475: Qwen3.8-27B-DFlash2 without its taps was served with guessed ones."""
    pair = small_pair()
    pair.dflash.update(selector_rank=2, selector_top_k=2)
    verifier, draft = pair.write(tmp_path / "good")
    report = check_pair(verifier, draft)
    assert report.layout is Layout.DFLASH2
    assert report.ok
    assert any("SGLang's own worker" in text for text in report.unchecked)
    del pair.dflash["target_layer_ids"]
    bad = check_pair(*pair.write(tmp_path / "bad"))
    assert [finding.code for finding in bad.errors] == ["taps_missing"]
