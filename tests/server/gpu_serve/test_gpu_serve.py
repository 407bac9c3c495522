"""`bench/gpu_serve.sh` from its command line to the file to attach, with servers on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import zipfile
from pathlib import Path

from bench.harness.servers import TestedServer

ROOT = Path(__file__).resolve().parents[3]


def test_the_whole_flow_on_the_cpu(tmp_path: Path) -> None:
    # Only here do a real server's streamed parts, log and information meet what reads them.
    out = tmp_path / "out"
    command = ["--cpu", "--quick", "--pairs", "moe", "--configurations", "plain", "adaptive"]
    TestedServer.starts += 2
    done = subprocess.run(
        [ROOT / "bench/gpu_serve.sh", *command, "--out", out],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((out / "results.json").read_text())
    plain, adaptive = results["runs"]
    assert [run["configuration"] for run in (plain, adaptive)] == ["plain", "adaptive"]
    for run in (plain, adaptive):
        assert run["start"]["memory"]["stages"], "SGLang's log lines are read"
        assert run["start"]["attention_backend"] == "dflash_cpu"
        assert [load["sampling"] for load in run["loads"]] == ["greedy", "default"]
        assert all(load["requests"] == 3 for load in run["loads"])
    assert plain["loads"][0]["tokens"] == adaptive["loads"][0]["tokens"]
    assert plain["loads"][0]["tau"] == 1.0
    assert adaptive["loads"][0]["tau"] > 3
    assert sum(adaptive["loads"][0]["steps_by_width"].values()) >= 3
    # In float32, as `launch/demo` shows.
    assert (adaptive["loads"][0]["equal"], adaptive["loads"][0]["compared"]) == (3, 3)
    with zipfile.ZipFile(out / "report.zip") as archive:
        text = "".join(archive.read(name).decode() for name in archive.namelist())
        assert "logs/moe-adaptive/server.log" in archive.namelist()
    assert [place for place in (tmp_path, ROOT, Path.home()) if f"{place}{os.sep}" in text] == []
