"""Planted bugs: every one must be caught by the kernels' own tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def plant(*ops: str) -> str:
    """The last line of `bench.kernels --mutants`, which fails if a bug survives or has no place."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.kernels", "--mutants", *ops],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


def test_bugs_of_the_smallest_kernel_are_caught() -> None:
    assert plant("prepare_block") == "4 of 4 caught"


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_all_bugs_are_caught() -> None:
    caught, _, planted, _ = plant().split()
    assert int(caught) == int(planted) > 60
