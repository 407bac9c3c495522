"""Every example says what it does; tests/server/test_examples.py runs them."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FILES = sorted(file for file in EXAMPLES.iterdir() if file.suffix in {".py", ".sh"})


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_help(file: Path) -> None:
    program = sys.executable if file.suffix == ".py" else "bash"
    done = subprocess.run([program, file, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"examples/{file.name}" in done.stdout


def test_readme_lists_every_example() -> None:
    text = (EXAMPLES / "README.md").read_text()
    assert [file.name for file in FILES if f"({file.name})" not in text] == []
