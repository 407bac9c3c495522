"""The fused decoder against SGLang's own forward, on the embedded pair."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_sglang import zoo

ROOT = Path(__file__).parents[4]
PROBE = Path(__file__).with_name("decoder_probe.py")
ENTRY_POINTS = "[sglang.srt.platforms]\ndflash_cpu = dflash_sglang.cpu:activate\n"


@pytest.mark.server
def test_fused_decoder_computes_what_sglangs_forward_computes(tmp_path: Path) -> None:
    """Prefill and decode of a ragged batch with tapped layers, and a block of the drafter.

    Catches a norm weight on the wrong heads, a rotation by the wrong position, a tap taken after
    its layer instead of before, a missing residual, copies of weights that an update left behind.
    In its own process: SGLang's state is global.
    """
    distribution = tmp_path / "probe-0.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: probe\nVersion: 0\n")
    (distribution / "entry_points.txt").write_text(ENTRY_POINTS)
    path = os.pathsep.join([str(tmp_path), str(ROOT), str(ROOT / "kernels")])
    pair = zoo.path("moe")
    run = subprocess.run(
        [sys.executable, "-P", str(PROBE), str(pair.verifier), str(pair.drafter)],
        env=os.environ | {"PYTHONPATH": path, "SGLANG_PLATFORM": "dflash_cpu"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    differences = json.loads(run.stdout.splitlines()[-1])
    # three forwards of the verifier, each with three taps; one block; two products after an update
    assert len(differences) == 15
    # float32 through six layers, each rounding in another order
    assert max(differences.values()) < 1e-4, differences
