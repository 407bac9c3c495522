"""The list of planted bugs; tests/kernels/compile/test_mutants.py runs them."""

from collections import Counter

from dflash_kernels.case import OPS

from bench.kernels.planted_bugs import MUTANTS


def test_every_kernel_has_bugs() -> None:
    planted = Counter(mutant.op for mutant in MUTANTS)
    assert set(planted) == set(OPS)
    assert min(planted.values()) >= 4


def test_a_bug_is_planted_once() -> None:
    assert len({(mutant.op, mutant.right, mutant.wrong) for mutant in MUTANTS}) == len(MUTANTS)
