"""Kernels in Triton's interpreter; `../test_interpreted.py` starts these files.

Their names keep them out of an ordinary run: TRITON_INTERPRET must be set before triton is
imported, and other tests import it without.
"""

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` gives NaN or the largest integer: what a kernel leaves out shows."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "started by tests/kernels/test_interpreted.py"
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    assert torch.empty(3).isnan().all()
    assert (torch.empty(3, dtype=torch.int64) == 2**63 - 1).all()
    yield
    torch.use_deterministic_algorithms(False)
