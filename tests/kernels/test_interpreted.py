"""The Triton kernels against their references, in Triton's interpreter, a process for each op."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.kernel
FILES = sorted(
    file for file in (ROOT / "tests/kernels/interpreted").glob("*.py") if file.stem != "conftest"
)


def test_every_kernel_has_cases() -> None:
    kernels = {file.parent.name for file in ROOT.glob("kernels/dflash_kernels/*/kernel.py")}
    assert {file.stem for file in FILES} == kernels | {"at_start"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_kernel_equals_reference(file: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
