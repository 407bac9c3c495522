"""Each op of the decode step against its reference, on the device that will serve."""

import time
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from dflash_kernels.case import OPS, Case, Trial, difference, part_of
from dflash_kernels.types import ServerShapes

__all__ = ["OpError", "self_test"]


class OpError(RuntimeError):
    """An op does not compile on this device, or its result differs from its reference's."""


def self_test(device: torch.device | str, shapes: ServerShapes) -> dict[str, float]:
    """Run every op in every form that the server will launch, and compare.

    Kernels have their forms compiled by this, so that none is compiled while requests wait.

    Args:
        device: to run on.
        shapes: of the server.

    Returns:
        Seconds that each op took, compilation included; nothing for those that are not used.

    Raises:
        OpError: with the op's name and what is wrong.
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    for op in OPS:
        for case in part_of(op, "cases").for_server(shapes):
            trial = case.on(device)
            begin = time.perf_counter()
            try:
                got = list(trial.run(part_of(op, "kernel")))
                torch.get_device_module(device).synchronize()
            except Exception as problem:
                raise OpError(f"{case.name} does not run: {problem}") from problem
            seconds[op] += time.perf_counter() - begin
            compare(op, case, trial, got)
    return dict(seconds)


def compare(op: str, case: Case, trial: Trial, got: Sequence[Tensor]) -> None:
    """Run the reference of an op, and compare.

    Raises:
        OpError: with the case and the output that differs.
    """
    expected = trial.run(part_of(op, "reference"))
    for i, pair in enumerate(zip(got, expected, strict=True)):
        if difference(*pair) > case.tolerance:
            raise OpError(f"{case.name} differs from its reference in output {i}")
