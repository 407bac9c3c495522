"""The examples, against the embedded pair."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.harness.servers import TestedServer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_request_with_curl(dflash: TestedServer) -> None:
    (choice,) = json.loads(run(EXAMPLES / "request.sh", dflash.url))["choices"]
    assert "SELECT color" in choice["message"]["content"]
    assert choice["meta_info"]["spec_verify_ct"] > 0


def test_the_openai_client_streams(dflash: TestedServer) -> None:
    out = run(sys.executable, EXAMPLES / "openai_client.py", "--url", dflash.url)
    assert "SELECT color" in out


def test_request_options_change_the_speed_only(dflash: TestedServer) -> None:
    out = run(sys.executable, EXAMPLES / "request_options.py", "--url", dflash.url)
    assert "SELECT color" in out
    verifies = [int(line.split()[-3]) for line in out.splitlines() if "verify steps" in line]
    assert len(verifies) == 3
    assert verifies[0] > verifies[1] > verifies[2]


@pytest.mark.nightly  # test_engine.py does the same every time
def test_the_engine_without_a_server() -> None:
    out = run(sys.executable, EXAMPLES / "offline_engine.py")
    assert "SELECT" in out
    assert out.count("tokens a verify step") == 2
