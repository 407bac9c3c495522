"""Planted bugs keep their places in the kernels; `bench.kernels --mutants` runs them all."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from bench.kernels.planted_bugs import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.op}: {mutant.bug}")
def test_a_bug_has_its_place(mutant: Mutant) -> None:
    # A kernel that was rewritten would leave its bugs behind, and the check would say nothing.
    source = (ROOT / "kernels/dflash_kernels" / mutant.op / "kernel.py").read_text()
    assert mutant.right in source
    assert mutant.wrong != mutant.right


def test_every_kernel_has_bugs() -> None:
    planted = Counter(mutant.op for mutant in MUTANTS)
    kernels = {file.parent.name for file in ROOT.glob("kernels/dflash_kernels/*/kernel.py")}
    assert set(planted) == kernels
    assert min(planted.values()) >= 4


def test_bugs_of_the_smallest_kernel_are_caught() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.kernels", "--mutants", "prepare_block"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 of 4 caught" in done.stdout
