"""Which environment a checkout uses, and what is found there."""

import json
from pathlib import Path

import pytest

from launch.pins import MARKER, State, find_state, location, read_pins, write_marker

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text(
        '[project]\ndependencies = ["sglang==1.0"]\n'
        '[project.optional-dependencies]\ndev = ["pytest", "ruff"]\n'
    )
    (tmp_path / "constraints.txt").write_text("torch==2.0\n")
    return tmp_path


def make_venv(path: Path, *, complete: bool, key: str = "key") -> Path:
    (path / "bin").mkdir(parents=True)
    (path / "bin" / "python").touch()
    write_marker(path, key, complete=complete)
    return path


def test_key_changes_with_a_dependency_and_with_a_transitive_pin(checkout: Path) -> None:
    first = read_pins(checkout)
    assert first.requirements == ("sglang==1.0", "pytest", "ruff")
    (checkout / "constraints.txt").write_text("torch==2.1\n")
    second = read_pins(checkout)
    project = (checkout / "pyproject.toml").read_text()
    (checkout / "pyproject.toml").write_text(project.replace("sglang==1.0", "sglang==1.1"))
    third = read_pins(checkout)
    assert len({first.key, second.key, third.key}) == 3


def test_key_ignores_what_does_not_change_the_installation(checkout: Path) -> None:
    before = read_pins(checkout).key
    with (checkout / "pyproject.toml").open("a") as file:
        file.write("[tool.ruff]\nline-length = 80\n")
    assert read_pins(checkout).key == before


def test_every_requirement_of_the_project_is_pinned() -> None:
    # A requirement added to pyproject.toml alone would be installed in any version.
    pins = read_pins(ROOT)
    lines = pins.constraints.read_text().splitlines()
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines if "==" in line}
    wanted = {name.split("=")[0].split(">")[0] for name in pins.requirements}
    assert wanted <= pinned
    assert "sglang==0.5.23" in lines


def test_constraints_name_releases_only() -> None:
    # A path or an address works on the machine that froze it and nowhere else.
    lines = read_pins(ROOT).constraints.read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert [line for line in pins if "==" not in line or "@" in line or "/" in line] == []


def test_location(checkout: Path) -> None:
    pins = read_pins(checkout)
    assert location(pins, {"DFLASH_SGLANG_VENV": "/a/b", "XDG_CACHE_HOME": "/c"}) == Path("/a/b")
    assert location(pins, {"XDG_CACHE_HOME": "/c"}) == Path("/c/dflash_sglang", pins.key)
    expected = Path.home() / ".cache" / "dflash_sglang" / pins.key
    assert location(pins, {}) == expected
    assert location(pins, {"DFLASH_SGLANG_VENV": "", "XDG_CACHE_HOME": ""}) == expected


def test_absent_when_missing_or_empty(tmp_path: Path) -> None:
    assert find_state(tmp_path / "nothing", "key") is State.ABSENT
    assert find_state(tmp_path, "key") is State.ABSENT


def test_states_of_an_environment_made_here(tmp_path: Path) -> None:
    venv = make_venv(tmp_path / "venv", complete=False)
    assert find_state(venv, "key") is State.HALF_MADE
    write_marker(venv, "key", complete=True)
    assert find_state(venv, "key") is State.READY
    assert find_state(venv, "other pins") is State.OUTDATED


def test_half_made_when_its_python_was_uninstalled(tmp_path: Path) -> None:
    venv = make_venv(tmp_path / "venv", complete=True)
    (venv / "bin" / "python").unlink()
    (venv / "bin" / "python").symlink_to(tmp_path / "uninstalled")
    assert find_state(venv, "key") is State.HALF_MADE


def test_foreign_without_marker(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    assert find_state(tmp_path, "key") is State.FOREIGN


def test_marker_is_replaced_whole(tmp_path: Path) -> None:
    write_marker(tmp_path, "key", complete=False)
    write_marker(tmp_path, "key", complete=True)
    assert json.loads((tmp_path / MARKER).read_text()) == {"key": "key", "complete": True}
    assert [file.name for file in tmp_path.iterdir()] == [MARKER]
