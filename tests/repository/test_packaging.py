"""What `pip install .` brings, and what it does not."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow
SOURCES = {
    "dflash_sglang": ROOT / "dflash_sglang",
    "dflash_kernels": ROOT / "kernels/dflash_kernels",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of a copy of the checkout: setuptools leaves folders beside the sources."""
    copy = tmp_path_factory.mktemp("checkout")
    ignore = shutil.ignore_patterns("__pycache__", "*_cache")
    for folder in ("dflash_sglang", "kernels", "launch", "tests", "bench"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignore)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy)
    command = ["-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", "out"]
    done = subprocess.run([sys.executable, *command, "."], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (copy / "out").iterdir()
    return zipfile.ZipFile(path)


def test_brings_every_module_and_data_file(wheel: zipfile.ZipFile) -> None:
    # Weights, tokenizer and prompts are data: a wheel without them installs and fails late.
    expected = {
        f"{package}/{file.relative_to(folder).as_posix()}"
        for package, folder in SOURCES.items()
        for file in folder.rglob("*")
        if file.suffix in {".py", ".safetensors", ".json", ".jinja", ".typed"}
        and "__pycache__" not in file.parts
    }
    assert len([name for name in expected if name.endswith(".safetensors")]) == 4
    assert expected - set(wheel.namelist()) == set()


def test_brings_nothing_else(wheel: zipfile.ZipFile) -> None:
    # A top-level `kernels`, `tests` or `launch` would shadow packages of other people.
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(SOURCES)


def test_entry_points_are_importable_names(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    lines = wheel.read(name).decode().split("\n")
    points = [line.split(" = ")[1] for line in lines if " = " in line]
    assert points == ["dflash_sglang.cpu:activate", "dflash_sglang.plugin:register"]
    for point in points:
        module, _, function = point.partition(":")
        files = {f"{module.replace('.', '/')}.py", f"{module.replace('.', '/')}/__init__.py"}
        (source,) = files & set(wheel.namelist())
        assert re.search(rf"(def|import)\b.*\b{function}\b", wheel.read(source).decode())


def test_pins_sglang(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("METADATA"))
    metadata = wheel.read(name).decode()
    assert "Requires-Dist: sglang==0.5.23\n" in metadata
    assert "License-Expression: Apache-2.0\n" in metadata
