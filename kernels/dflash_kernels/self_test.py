"""Each op of the decode step against its reference, on the device that will serve."""

import time

import torch
from torch import Tensor

from dflash_kernels.self_test_cases import cases
from dflash_kernels.types import ServerShapes

__all__ = ["OpError", "self_test"]


class OpError(RuntimeError):
    """An op does not compile on this device, or computes something else than its reference."""


def self_test(device: torch.device | str, shapes: ServerShapes) -> dict[str, float]:
    """Run every op once and compare.

    Args:
        device: to run on.
        shapes: of the server.

    Returns:
        Seconds that each op took, compilation included.

    Raises:
        OpError: with the op's name and what is wrong.
    """
    seconds = {}
    for case in cases(device, shapes):
        begin = time.perf_counter()
        try:
            got = list(case.kernel())
            torch.get_device_module(device).synchronize()
        except Exception as problem:
            raise OpError(f"{case.op} does not run: {problem}") from problem
        seconds[case.op] = time.perf_counter() - begin
        expected = list(case.reference())
        pairs = enumerate(zip(got, expected, strict=True))
        wrong = [i for i, pair in pairs if not _equal(*pair, case.tolerance)]
        if wrong:
            raise OpError(f"{case.op} differs from its reference in output {wrong[0]}")
    return seconds


def _equal(got: Tensor, expected: Tensor, tolerance: float) -> bool:
    if got.dtype != expected.dtype:
        return False
    if not tolerance or not got.dtype.is_floating_point:
        return torch.equal(got, expected)
    return torch.allclose(got.float(), expected.float(), rtol=tolerance, atol=tolerance)
