"""Committed states of recurrent layers against a plain decoding that stopped at the same token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.harness.hybrids import hybrid_pair

ROOT = Path(__file__).parents[4]
PROBE = Path(__file__).with_name("states_probe.py")
ENTRY_POINTS = "[sglang.srt.platforms]\ndflash_cpu = dflash_sglang.cpu:activate\n"
# float32 through four layers, each rounding in another order: the states of a decoding and of a
# verify differ by this much of their largest element.
CLOSE = 1e-5


@pytest.mark.server
@pytest.mark.parametrize("rollback", ["replay", "snapshot"])
def test_committed_states_are_plain_decodings(tmp_path: Path, rollback: str) -> None:
    """A batch with every accepted length, then one at a narrower width, then a single token.

    Every recurrent layer, its convolution's window too, and the states kept at boundaries. In its
    own process: SGLang's state is global.
    """
    distribution = tmp_path / "probe-0.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: probe\nVersion: 0\n")
    (distribution / "entry_points.txt").write_text(ENTRY_POINTS)
    path = os.pathsep.join([str(tmp_path), str(ROOT), str(ROOT / "kernels")])
    pair = hybrid_pair(tmp_path / "pair")
    run = subprocess.run(
        [
            *(sys.executable, "-P", str(PROBE)),
            *(str(pair.verifier), str(pair.drafter), rollback, str(tmp_path)),
        ],
        env=os.environ | {"PYTHONPATH": path, "SGLANG_PLATFORM": "dflash_cpu"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["replay"] == (rollback == "replay")
    for width in (16, 4, 1):
        assert found[f"width {width}"] < CLOSE, found
    assert found["tracked"] < CLOSE, found
    assert found["boundaries"] > 8
    # A commit one token short or one too many would be far away, for whatever request.
    assert found["neighbour"] > 1000 * CLOSE, found
