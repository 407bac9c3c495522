"""Every tool of bench/ starts, and every room is in bench/README.md."""

import runpy
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"
NO_ROOMS = {"harness"}  # shared by the rooms; its scripts run inside servers


def tools() -> list[str]:
    """Modules that run as `python -m`: found, not listed, so that no new one is forgotten."""
    files = [
        file
        for room in rooms()
        for file in (BENCH / room).rglob("*.py")
        if "\nif __name__ ==" in file.read_text()
    ]
    names = (".".join(file.relative_to(BENCH.parent).with_suffix("").parts) for file in files)
    return sorted(name.removesuffix(".__main__") for name in names)


def rooms() -> list[str]:
    folders = {file.parent.name for file in BENCH.glob("*/*.py")}
    return sorted(folders - NO_ROOMS)


def test_tools_are_found() -> None:
    assert {"bench.exactness", "bench.exactness.corpus", "bench.width.record"} <= set(tools())


# One process for all: SGLang is imported once.
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("tool", tools())
def test_help_is_shown(
    tool: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [tool, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(tool, run_name="__main__")
    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out


@pytest.mark.parametrize("room", rooms())
def test_a_room_runs_and_the_readme_says_how(room: str) -> None:
    assert (BENCH / room / "__main__.py").exists()
    command = "bench/gpu_check.sh" if room == "gpu" else f"python -m bench.{room}"
    assert f"`{command}`" in (BENCH / "README.md").read_text(encoding="utf-8")
