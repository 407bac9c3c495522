"""Planted bugs: each kernel with one line wrong must fail its interpreted tests.

A copy of the kernels and their cases is changed in one place and tested in a forked process, which
shares the imports of torch and triton. The unchanged copy must pass, or a failure proves nothing.
"""

import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.kernels.planted_bugs import MUTANTS, SHARED, Mutant

ROOT = Path(__file__).resolve().parents[2]
CASES = "tests/kernels/interpreted"
SKIPPED = "not vocabulary"  # takes seconds, and catches nothing that the rest does not


class Verdict(NamedTuple):
    """Whether the tests caught one mutant."""

    op: str
    bug: str
    caught: bool


def main(ops: Sequence[str] = ()) -> list[Verdict]:
    """Test the unchanged kernels, then every mutant.

    Args:
        ops: only these; empty: all.

    Raises:
        RuntimeError: a kernel fails unchanged, or a mutant's text is not in its file.
    """
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported, here and never again
    for module in ("torch", "triton", "triton.language", "numpy", "pytest"):
        importlib.import_module(module)
    mutants = [mutant for mutant in MUTANTS if not ops or mutant.op in ops]
    for op in sorted({mutant.op for mutant in mutants}):
        if not passes(Mutant(op, "none", "", "")):
            raise RuntimeError(f"{op} fails its tests unchanged")
    return [Verdict(mutant.op, mutant.bug, not passes(mutant)) for mutant in mutants]


def passes(mutant: Mutant) -> bool:
    """Whether the cases of the mutant's op pass on a changed copy."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for part in ("kernels", "tests/kernels", "tests/support"):
            shutil.copytree(ROOT / part, root / part)
        (root / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
        package = root / "kernels/dflash_kernels"
        file = package / mutant.file if mutant.file == SHARED else package / mutant.op / mutant.file
        source = file.read_text()
        if mutant.right not in source:
            raise RuntimeError(
                f"{mutant.op}: {mutant.bug}: {mutant.right!r} is not in {mutant.file}"
            )
        file.write_text(source.replace(mutant.right, mutant.wrong, 1))
        child = os.fork()
        if child == 0:
            run_cases(root, mutant.op)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def run_cases(root: Path, op: str) -> None:
    """In the forked process: run the cases of one op, and leave with their status."""
    import pytest
    import torch

    torch.set_num_threads(1)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    sys.path[:0] = [str(root / "kernels"), str(root)]
    os.chdir(root)
    cases = f"{CASES}/{op}.py"
    os._exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-k", SKIPPED, cases]))
