"""Imports flow one way, and only where they are meant to: see docs/architecture.md."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]

# A part may import parts with a lower number, and itself.
LEVELS = {
    "dflash_kernels": 0,
    "dflash_sglang.errors": 0,
    "dflash_sglang.json_values": 1,
    "dflash_sglang.config": 2,
    "dflash_sglang.core": 2,
    "dflash_sglang.drafter": 2,
    "dflash_sglang.zoo": 2,
    "dflash_sglang.cpu": 3,
    "dflash_sglang.preflight": 3,
    "dflash_sglang.step": 3,
    "dflash_sglang.hooks": 4,
    "dflash_sglang.check": 4,
    "dflash_sglang.plugin": 5,
    "launch": 6,
    "bench": 7,
    "tests": 8,
}
SIBLINGS = {
    ("dflash_sglang.config", "dflash_sglang.core"),  # the settings file's width part is core's
}
MAY_IMPORT_SGLANG = {
    "dflash_sglang.cpu",
    "dflash_sglang.hooks",
    "dflash_sglang.preflight",
    "dflash_sglang.step",
    "bench",
    "tests",
}
TRITON_FILES = ("kernel.py", "triton_common.py", "late_compiles.py")
SCRIPT_FOLDERS = ("kernels", "tests", "bench", "launch", "docs")


class Import(NamedTuple):
    file: Path
    line: int
    module: str  # dotted, absolute

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {self.module}"


def source_files() -> list[Path]:
    folders = ("dflash_sglang", *SCRIPT_FOLDERS)
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def dotted_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "kernels" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str | None:
    """The entry of LEVELS that a module belongs to; None for foreign modules."""
    return next((part for part in LEVELS if f"{module}.".startswith(f"{part}.")), None)


def imports_of(file: Path, text: str | None = None) -> Iterator[Import]:
    """Every import statement, also those inside functions."""
    package = dotted_name(file).split(".")
    if file.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(file.read_text() if text is None else text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                # `from dflash_sglang import step` imports a part by name.
                yield Import(file, node.lineno, f"{module}.{alias.name}")


def violations(file: Path, text: str | None = None) -> Iterator[str]:
    part = part_of(dotted_name(file))
    for found in imports_of(file, text):
        root = found.module.split(".")[0]
        target = part_of(found.module)
        if root == "sglang" and part not in MAY_IMPORT_SGLANG:
            yield f"{found}: only {', '.join(sorted(MAY_IMPORT_SGLANG))} may"
        triton_here = file.name in TRITON_FILES or part in {"bench", "tests"}
        if root == "triton" and not triton_here:
            yield f"{found}: only {', '.join(TRITON_FILES)}, bench and tests may"
        if part is None or target is None or part == target or (part, target) in SIBLINGS:
            continue
        if LEVELS[target] >= LEVELS[part]:
            yield f"{found}: against the arrow"


def test_imports_follow_the_arrow() -> None:
    found = [line for file in source_files() for line in violations(file)]
    assert found == []


def test_every_module_of_the_packages_has_a_level() -> None:
    # A new top-level module would otherwise escape the arrow.
    packages = [file for file in source_files() if file.parts[len(ROOT.parts)] != "docs"]
    without = [str(file) for file in packages if part_of(dotted_name(file)) is None]
    assert [name for name in without if not name.endswith("dflash_sglang/__init__.py")] == []
    root_module = ROOT / "dflash_sglang" / "__init__.py"
    assert list(imports_of(root_module)) == [], "importing the package must stay cheap"


@pytest.mark.parametrize("folder", SCRIPT_FOLDERS)
def test_script_folders_are_not_packages(folder: str) -> None:
    # kernels/__init__.py would shadow the package `kernels` that SGLang imports.
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("dflash_sglang/core/x.py", "import sglang"),
        ("dflash_sglang/core/x.py", "def f():\n    from sglang.srt import utils"),
        ("dflash_sglang/core/x.py", "from dflash_sglang import step"),
        ("dflash_sglang/core/x.py", "from ..step import worker"),
        ("dflash_sglang/core/x.py", "from dflash_sglang.drafter import layout"),
        ("dflash_sglang/step/x.py", "from dflash_sglang.plugin import register"),
        ("dflash_sglang/step/x.py", "from launch.serving import Server"),
        ("kernels/dflash_kernels/op/x.py", "import dflash_sglang.core"),
        ("kernels/dflash_kernels/op/reference.py", "import triton.language as tl"),
        ("kernels/dflash_kernels/op/cases.py", "import triton"),
        ("launch/x.py", "from tests import helper"),
        ("launch/x.py", "import sglang"),
    ],
)
def test_violations_are_found(file: str, text: str) -> None:
    assert list(violations(ROOT / file, text)) != []


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("dflash_sglang/step/x.py", "import sglang\nfrom dflash_sglang.core import accept"),
        ("dflash_sglang/step/x.py", "from . import worker"),
        ("kernels/dflash_kernels/op/kernel.py", "import triton"),
        ("kernels/dflash_kernels/triton_common.py", "import triton"),
        ("tests/server/x.py", "import sglang\nfrom launch.serving import Server"),
        ("dflash_sglang/core/x.py", "import torch"),
    ],
)
def test_allowed_imports_pass(file: str, text: str) -> None:
    assert list(violations(ROOT / file, text)) == []
