"""What host.recurrent relies on in SGLang's replay kernels, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("file", "passed"), [("replay_interpreted.py", 4), ("replay_tf32_interpreted.py", 1)]
)
def test_sglangs_kernels_keep_the_protocol(file: str, passed: int) -> None:
    path = str(Path(__file__).with_name(file))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", path],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{passed} passed" in done.stdout
