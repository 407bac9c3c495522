"""The strict format of a plain DFlash head."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from dflash_sglang import zoo
from dflash_sglang.drafter.checkpoint import (
    FULL,
    SLIDING,
    CheckpointError,
    OtherHeadError,
    TensorInfo,
    expected_tensors,
    load_config,
    parse_config,
    read_headers,
    tensor_problems,
)
from dflash_sglang.errors import PairError


@pytest.fixture
def raw() -> dict[str, Any]:
    """A correct config.json."""
    return json.loads((zoo.path("moe").drafter / "config.json").read_text(encoding="utf-8"))


def test_embedded_drafter_fits_its_own_description() -> None:
    drafter = zoo.path("moe").drafter
    assert tensor_problems(load_config(drafter), read_headers(drafter)) == []


def test_missing_unexpected_and_misshapen_tensors_are_all_named(raw: dict[str, Any]) -> None:
    config = parse_config(raw)
    found = {name: TensorInfo("BF16", shape) for name, shape in expected_tensors(config).items()}
    found["lm_head.weight"] = TensorInfo("BF16", (1024, 256))
    found["fc.weight"] = TensorInfo("BF16", (256, 512))  # one tap too few
    del found["layers.1.mlp.up_proj.weight"]
    problems = tensor_problems(config, found)
    assert len(problems) == 3
    assert "missing tensor layers.1.mlp.up_proj.weight" in problems[0]
    assert "unexpected tensor lm_head.weight" in problems[1]
    assert "fc.weight has shape (256, 512), config.json implies (256, 768)" in problems[2]


def test_biases_are_expected_exactly_when_the_config_says_so(raw: dict[str, Any]) -> None:
    plain = expected_tensors(parse_config(raw))
    biased = expected_tensors(parse_config(raw | {"attention_bias": True}))
    assert {name for name in biased if name not in plain} == {
        f"layers.{layer}.self_attn.{p}_proj.bias" for layer in (0, 1) for p in "qkvo"
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": None}, "block_size as a positive integer"),
        ({"block_size": 1}, "block_size must be at least 2"),
        ({"hidden_size": "256"}, "hidden_size as a positive integer"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ({"rope_theta": None}, "rope_theta as a positive number"),
        ({"dflash_config": None}, "no dflash_config section"),
        ({"layer_types": [FULL]}, "layer_types must name 2 layers"),
        ({"layer_types": [FULL, "chunked"]}, "layer_types must name 2 layers"),
        ({"layer_types": [FULL, SLIDING]}, "sliding_window as a positive integer"),
        ({"partial_rotary_factor": 1.5}, "rotary dimensions do not fit head_dim"),
    ],
)
def test_unusable_settings_are_refused(
    raw: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_config(raw | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # SGLang falls back to a formula when the taps are missing: wrong layers, silently.
        ({"target_layer_ids": None}, "needs target_layer_ids"),
        ({"target_layer_ids": []}, "needs target_layer_ids"),
        ({"target_layer_ids": [3, 1, 4]}, "must be increasing"),
        ({"target_layer_ids": [1, 3, 5]}, "must all be below 5, the last layer"),
        ({"mask_token_id": None}, "needs mask_token_id"),
        ({"mask_token_id": 1024}, "outside the vocabulary of 1024"),
        ({"mask_token_id": -1}, "outside the vocabulary of 1024"),
    ],
)
def test_unusable_dflash_settings_are_refused(
    raw: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    raw["dflash_config"] |= change
    with pytest.raises(CheckpointError, match=message):
        parse_config(raw)


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": ["Qwen3DSparkModel"]},
        {"architectures": ["DFlashDraftModel", "Other"]},
        {"architectures": None},
        {"projector_type": "domino"},
        {"markov_rank": 256},
        {"sample_from_anchor": True},
        {"has_embed_tokens": True},
        {"use_gemma_norm": True},
        {"hidden_act": "swigluoai"},
    ],
)
def test_other_head_families_are_told_apart(raw: dict[str, Any], change: dict[str, Any]) -> None:
    with pytest.raises(OtherHeadError):
        parse_config(raw | change)


def test_unknown_dflash_key_is_another_head_unless_switched_off(raw: dict[str, Any]) -> None:
    raw["dflash_config"]["selector_rank"] = 0
    parse_config(raw)
    raw["dflash_config"]["selector_rank"] = 64
    with pytest.raises(OtherHeadError, match="selector_rank"):
        parse_config(raw)


def test_sliding_layers_are_causal_unless_told_otherwise(raw: dict[str, Any]) -> None:
    raw |= {"layer_types": [SLIDING, FULL], "sliding_window": 32}
    config = parse_config(raw)
    assert config.layer_causal == (True, False)
    assert (config.window_of(0), config.window_of(1)) == (32, None)
    assert parse_config(raw | {"is_causal": False}).layer_causal == (False, False)


def test_partial_rotary_dims_are_read_from_either_place(raw: dict[str, Any]) -> None:
    assert parse_config(raw | {"partial_rotary_factor": 0.25}).rotary_dim == 16
    nested = {"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}}
    config = parse_config(raw | nested)
    assert (config.rotary_dim, config.rope_theta) == (32, 5e5)


def test_a_missing_folder_and_broken_json_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(PairError, match=r"config\.json does not exist"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(PairError, match="cannot be read as JSON"):
        load_config(tmp_path)


def _safetensors(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a safetensors file"),
        (b"not at all a safetensors file", "not a safetensors file"),
        (_safetensors(b"{]"), "malformed safetensors header"),
        (_safetensors({"norm.weight": {"dtype": "BF16"}}), "malformed safetensors header"),
        (
            _safetensors(
                {"a": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]}}, data=b"1234567"
            ),
            "truncated",
        ),
    ],
)
def test_damaged_weight_files_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_headers(tmp_path)


def test_a_tensor_stored_in_two_files_is_refused(tmp_path: Path) -> None:
    entry = {"a": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]}}
    for name in ("one", "two"):
        (tmp_path / f"{name}.safetensors").write_bytes(_safetensors(entry, data=bytes(8)))
    with pytest.raises(CheckpointError, match="stores tensor a twice"):
        read_headers(tmp_path)


def test_no_weights_at_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no \*\.safetensors file"):
        read_headers(tmp_path)
