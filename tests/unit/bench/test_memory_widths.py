"""The gate on what widths add: memory beside the block's, and graphs beside SGLang's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from dflash_sglang.step.setup.width_capture import LEAST_FREE_GB

BACKENDS = ("fa3", "triton", "flashinfer")
# GB by the most requests at once. SGLang keeps 10 GB free on a large GPU, for prefills.
LIMITS = {48: 0.5, 256: 2.0}
MOST_GRAPHS = 2.5  # of SGLang's own worker

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], dict[str, Any]]:
    """In a process of its own: it stands in for a library that needs a driver."""
    file = tmp_path_factory.mktemp("widths") / "widths.json"
    subprocess.run(
        [sys.executable, "-m", "bench.memory", "widths", "--json", str(file)],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    found = json.loads(file.read_text())["rows"]
    return {(row["backend"], row["requests"]): row for row in found}


@pytest.mark.parametrize("requests", LIMITS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_widths_add_little_memory(rows: Any, backend: str, requests: int) -> None:
    row = rows[backend, requests]
    assert row["added_gb"] + row["pinned_gb"] < LIMITS[requests]
    # Else nothing would have been allocated that could be shared.
    assert row["alone_gb"] > LIMITS[requests]


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_width_needs_more_for_a_moment_than_a_start_keeps_free(rows: Any, backend: str) -> None:
    """Buffers that the block's replace are allocated first, but for the largest."""
    assert rows[backend, 256]["moment_gb"] < LEAST_FREE_GB


@pytest.mark.parametrize("requests", LIMITS)
def test_widths_add_few_graphs(rows: Any, requests: int) -> None:
    row = rows["fa3", requests]
    assert row["graphs_of_sglang"] == {48: 46, 256: 102}[requests]
    assert row["graphs"] <= MOST_GRAPHS * row["graphs_of_sglang"]


def test_wrappers_share_their_plans(rows: Any) -> None:
    """8 MiB on the device and as many pinned for each batch size and width, if not."""
    few, many = rows["flashinfer", 8], rows["flashinfer", 256]
    assert many["pinned_gb"] == few["pinned_gb"]
    assert many["pinned_alone_gb"] > 2 * few["pinned_alone_gb"]
