"""Contents of the repository's files."""

import re
import tomllib
from pathlib import Path

import dflash_sglang

ROOT = Path(__file__).resolve().parents[2]
IGNORED = {".git", "build", "dist", "__pycache__", ".venv"}
BENCH_SCRIPTS = ("bench/gpu_check.sh", "bench/gpu_serve.sh")
BINARY = {".safetensors", ".png", ".pt"}


def text_files() -> list[Path]:
    return [
        file
        for file in sorted(ROOT.rglob("*"))
        if file.is_file()
        and file.suffix not in BINARY
        and not any(
            part in IGNORED or part.endswith(("_cache", ".egg-info"))
            for part in file.relative_to(ROOT).parts
        )
    ]


def lines_with(pattern: str) -> list[str]:
    search = re.compile(pattern).search
    return [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
        for file in text_files()
        for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1)
        if search(line)
    ]


def test_no_file_names_a_package_registry() -> None:
    # Where packages come from is the business of whoever installs them.
    # In pieces: this file must not match itself.
    hosts = [r"pypi\." + "org", "python" + "hosted", r"download\.py" + r"torch\.org"]
    assert lines_with("|".join(hosts)) == []


def test_no_file_names_a_path_of_one_machine() -> None:
    # Home and scratch folders differ from machine to machine.
    folders = "|".join(["ro" + "ot", "ho" + "me", "wo" + "rk", "t" + "mp", "Us" + "ers"])
    assert lines_with(rf"(?<![\w.$}}~*)-])/({folders})/\w") == []


def test_scripts_are_executable() -> None:
    for script in ("launch/demo", "launch/setup.sh", "tests/run", ".ci/run", *BENCH_SCRIPTS):
        assert (ROOT / script).stat().st_mode & 0o111, script


def test_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == dflash_sglang.__version__
    newest = re.search(r"(?m)^## \[(\d.*)\]", (ROOT / "CHANGELOG.md").read_text())
    assert newest is not None
    assert newest[1] == project["version"]
    assert f"\nversion: {newest[1]}\n" in (ROOT / "CITATION.cff").read_text()
