"""`context_kv`: Triton against the reference."""

import pytest
import torch
from dflash_kernels.case import BF16, FP16, FP32, Case, Inputs
from dflash_kernels.context_kv import cases, kernel, reference
from dflash_kernels.types import FP8

from tests.support.kernel_cases import run_case

# Float32 differs by the order of a sum; a rounded dtype by one step, where that straddles a tie.
TOLERANCES = {  # relative, absolute
    FP32: (2e-6, 2e-6),
    FP16: (2**-10, 2e-6),
    BF16: (2**-7, 2e-6),
    FP8: (2**-3, 2**-9),
}


@pytest.mark.parametrize("case", [*cases.GRID, *cases.CASES], ids=lambda case: case.name)
def test_kernel_equals_reference(case: Case) -> None:
    got, expected = run_case("context_kv", case)
    layers, dtype = len(got) // 2, got[0].dtype
    keys, expected_keys = (
        torch.stack([t.float() for t in side[:layers]]) for side in (got, expected)
    )
    rtol, atol = TOLERANCES[dtype]
    torch.testing.assert_close(keys, expected_keys, rtol=rtol, atol=atol)
    if dtype == FP8:
        assert (keys != expected_keys).float().mean() < 1e-3
    # Values are only rounded: the same bits, NaN and -0 included.
    for ours, theirs in zip(got[layers:], expected[layers:], strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_as_a_custom_op() -> None:
    # The op behind the public function: argument order. `opcheck` would copy the buffers, which
    # the kernel finds by their distances.
    valid_lens = torch.tensor([2, 3], dtype=torch.int32)
    given = cases.projections(Inputs("cpu", 1), tokens=6)._replace(valid_lens=valid_lens)
    expected, ours = given.write(reference), given.write(kernel)
    for buffer in (*ours.keys, *ours.values):
        buffer.fill_(7.0)  # as before the write
    torch.ops.dflash.context_kv.default(*given[:5], *ours, cases.EPS, valid_lens)
    for side in ("keys", "values"):
        got, wanted = (torch.stack(list(getattr(caches, side))) for caches in (ours, expected))
        torch.testing.assert_close(got, wanted, rtol=2e-6, atol=2e-6)
