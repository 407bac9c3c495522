"""The settings file: defaults, values, and the sentence for each thing that can be wrong."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from dflash_sglang.config import _KEYS, MAX_TOP_K, Settings, WidthChoice, read_settings
from dflash_sglang.errors import ConfigError


def written(folder: Path, content: object) -> str:
    file = folder / "settings.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(file)


def test_no_file_means_defaults() -> None:
    assert read_settings(None, lora=False) == Settings()


def test_an_empty_object_means_defaults(tmp_path: Path) -> None:
    assert read_settings(written(tmp_path, {}), lora=False) == Settings()


def test_every_key_is_taken(tmp_path: Path) -> None:
    given = {
        "width": "fixed",
        "widths": [1, 5],
        "min_width": 2,
        "max_width": 12,
        "half_life": 10,
        "hysteresis": 0,
        "explore_share": 0.05,
        "narrow_cuda_graph_max_bs": 0,
        "narrow": False,
        "draft_temperature": 0.9,
        "draft_top_k": 3,
        "ops": "reference",
        "rollback": "replay",
    }
    assert set(given) == {field.name for field in fields(Settings)}
    wanted = Settings(**{**given, "widths": (1, 5)})  # type: ignore[arg-type]
    assert read_settings(written(tmp_path, given), lora=False) == wanted


def test_the_log_line_names_every_setting() -> None:
    line = str(Settings(draft_temperature=0.25))
    assert "draft_temperature=0.25" in line
    assert all(field.name in line for field in fields(Settings))


def test_a_fixed_width_is_a_ladder_of_one() -> None:
    assert Settings(width=WidthChoice.FIXED).width_settings(16).ladder(16) == (16,)
    assert Settings(width=WidthChoice.FIXED, max_width=5).width_settings(16).ladder(16) == (5,)


def test_an_adaptive_ladder_ends_at_the_block() -> None:
    assert Settings().width_settings(10).ladder(10) == (1, 4, 8, 10)
    assert Settings(min_width=2, max_width=8).width_settings(16).ladder(16) == (4, 8)


def test_limits_beyond_the_block_are_refused() -> None:
    with pytest.raises(ConfigError, match="block size 8"):
        Settings(max_width=12).width_settings(8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"temprature": 1}, "has the unknown key 'temprature'. Known keys: width, widths"),
        ({"width": "narrow"}, "width is 'narrow'. Give one of 'adaptive', 'fixed'"),
        ({"narrow": 1}, "narrow is 1. Give true or false"),
        ({"ops": "cuda"}, "ops is 'cuda'. Give one of 'triton', 'reference'"),
        ({"widths": []}, "widths is []"),
        ({"widths": [0]}, "widths is [0]"),
        ({"max_width": 0}, "max_width is 0"),
        ({"half_life": 0}, "half_life is 0"),
        ({"explore_share": 0}, "explore_share is 0"),
        ({"draft_temperature": 0}, "draft_temperature is 0. Give a number above 0"),
        ({"draft_temperature": "hot"}, "draft_temperature is 'hot'"),
        ({"draft_temperature": True}, "draft_temperature is True"),
        ({"draft_top_k": 0}, f"draft_top_k is 0. Give an integer from 1 to {MAX_TOP_K}"),
        ({"draft_top_k": 2.5}, "draft_top_k is 2.5"),
        (
            {"narrow_cuda_graph_max_bs": -1},
            "narrow_cuda_graph_max_bs is -1. Give an integer from 0",
        ),
        ([1], "is not a JSON object"),
        ("{", "cannot be read"),
    ],
)
def test_a_wrong_file_is_refused(content: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--speculative-adaptive-config") as refused:
        read_settings(written(tmp_path, content), lora=False)
    assert message in str(refused.value)


def test_a_value_is_refused_wherever_it_comes_from() -> None:
    with pytest.raises(ConfigError, match=r"draft_top_k is 99\. Give an integer from 1 to 32"):
        Settings(draft_top_k=99)


def test_every_field_has_its_rule() -> None:
    """Without one a new knob would be taken as it is."""
    assert set(_KEYS) == {field.name for field in fields(Settings)}


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_settings(str(tmp_path / "none.json"), lora=False)


# ---- with LoRA ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", [None, {}, {"width": "fixed", "widths": [1, 8]}, {"ops": "triton"}]
)
def test_with_lora_every_step_has_the_width_of_the_block(content: object, tmp_path: Path) -> None:
    path = None if content is None else written(tmp_path, content)
    settings = read_settings(path, lora=True)
    assert settings.width is WidthChoice.FIXED
    assert settings.width_settings(16).ladder(16) == (16,)


def test_with_lora_other_settings_are_kept(tmp_path: Path) -> None:
    given = {"rollback": "replay", "draft_top_k": 3, "max_width": None}
    settings = read_settings(written(tmp_path, given), lora=True)
    assert (settings.rollback, settings.draft_top_k) == ("replay", 3)


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ({"width": "adaptive"}, "width is 'adaptive'"),
        ({"widths": [1, 16]}, "widths is [1, 16]"),
        ({"min_width": 2}, "min_width is 2"),
        ({"max_width": 8}, "max_width is 8"),
        ({"width": "fixed", "max_width": 8}, "max_width is 8"),
    ],
)
def test_with_lora_asking_for_another_width_is_refused(
    content: object, key: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="with LoRA every step has the width") as refused:
        read_settings(written(tmp_path, content), lora=True)
    assert f"settings.json: {key}" in str(refused.value)
    assert "--speculative-dflash-block-size" in str(refused.value)
