"""The shape of the repository: folders of a size, links that lead somewhere, lines that end."""

import functools
import importlib.util
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = ("dflash_sglang", "kernels", "bench", "launch", "tests", "examples")
MAX_MODULES = 15
MAX_LINE = 100
PAGES = sorted(
    file
    for pattern in ("*.md", "docs/**/*.md", "bench/**/*.md", "kernels/**/*.md", "examples/*.md")
    for file in ROOT.glob(pattern)
)
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)]*)?\)")
# `step/worker.py` or `docs/data/width.json`, as pages name files.
MENTION = re.compile(r"`(?:\./)?((?:[\w.-]+/)+[\w.-]+\.(?:py|md|json|sh|yaml|yml|svg|txt))`")


def test_no_folder_holds_too_many_modules() -> None:
    modules = [
        file
        for folder in CODE
        for file in (ROOT / folder).rglob("*.py")
        if file.name != "__init__.py"
    ]
    sizes = Counter(file.parent.relative_to(ROOT).as_posix() for file in modules)
    assert {folder: size for folder, size in sizes.items() if size > MAX_MODULES} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files(page: Path) -> None:
    targets = [target for target, _ in LINK.findall(page.read_text()) if "://" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_named_files_exist(page: Path) -> None:
    """Files may be named without their first folders, ours and SGLang's."""
    named = set(MENTION.findall(page.read_text()))
    assert {name for name in named if not ends_some_path(name)} == set()


@functools.cache
def paths() -> tuple[str, ...]:
    (sglang,) = importlib.util.find_spec("sglang").submodule_search_locations  # type: ignore[union-attr, misc]
    ours = [file for folder in (*CODE, "docs") for file in (ROOT / folder).rglob("*")]
    return tuple(f"/{file}" for file in (*ours, *Path(sglang).rglob("*.py")))


def ends_some_path(name: str) -> bool:
    return (ROOT / name).exists() or any(path.endswith(f"/{name}") for path in paths())


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines that are no table, no code and no bare link."""
    in_code = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code and not line.lstrip().startswith(("|", "![", "<!--")):
            yield number, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_prose_wraps(page: Path) -> None:
    assert [number for number, line in prose(page) if len(line) > MAX_LINE] == []
