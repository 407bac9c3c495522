"""Marks of the tests here: `kernel` for Triton's interpreter, `compile` ahead of time."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
MARKS = {FOLDER / "interpreted": pytest.mark.kernel, FOLDER / "compile": pytest.mark.compile}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for folder, mark in MARKS.items():
            if item.path.is_relative_to(folder):
                item.add_marker(mark)
