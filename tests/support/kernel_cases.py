"""Runs a case of an op with the interpreted kernel and with the reference."""

from collections.abc import Sequence
from typing import NamedTuple

from dflash_kernels.case import Case, difference, part_of
from torch import Tensor


class Results(NamedTuple):
    """Of one case, output by output."""

    got: Sequence[Tensor]
    expected: Sequence[Tensor]


def run_case(op: str, case: Case) -> Results:
    """Both results; the kernel's is in the regime that the case is named after."""
    trial = case.on("cpu")
    got = trial.run(part_of(op, "kernel"))
    assert trial.holds(got)
    return Results(got, trial.run(part_of(op, "reference")))


def assert_equal(results: Results) -> None:
    """Shapes, dtypes and every number are the same."""
    assert list(map(difference, *results)) == [0.0] * len(results.expected)
