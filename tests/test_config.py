"""The settings file: defaults, values, and the sentence for each thing that can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_sglang.config import MAX_TOP_K, Settings, read_settings
from dflash_sglang.errors import ConfigError


def written(folder: Path, content: object) -> str:
    file = folder / "settings.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(file)


def test_no_file_means_defaults() -> None:
    assert read_settings(None) == Settings()


def test_an_empty_object_means_defaults(tmp_path: Path) -> None:
    assert read_settings(written(tmp_path, {})) == Settings()


def test_every_key_is_taken(tmp_path: Path) -> None:
    given = {"draft_temperature": 0.9, "draft_top_k": 3}
    assert read_settings(written(tmp_path, given)) == Settings(**given)


def test_the_log_line_names_every_setting() -> None:
    line = str(Settings(draft_temperature=0.25, draft_top_k=7))
    assert line == "draft_temperature=0.25, draft_top_k=7"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"temprature": 1}, "has the unknown key 'temprature'. Known keys: draft_temperature"),
        ({"draft_temperature": 0}, "draft_temperature is 0. Give a number above 0"),
        ({"draft_temperature": "hot"}, "draft_temperature is 'hot'"),
        ({"draft_temperature": True}, "draft_temperature is True"),
        ({"draft_top_k": 0}, f"draft_top_k is 0. Give an integer from 1 to {MAX_TOP_K}"),
        ({"draft_top_k": 2.5}, "draft_top_k is 2.5"),
        ([1], "is not a JSON object"),
        ("{", "cannot be read"),
    ],
)
def test_a_wrong_file_is_refused(content: object, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--speculative-adaptive-config") as refused:
        read_settings(written(tmp_path, content))
    assert told in str(refused.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_settings(str(tmp_path / "none.json"))
