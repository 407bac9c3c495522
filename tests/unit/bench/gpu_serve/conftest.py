"""The whole tool with servers that are stubs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.gpu.serve import __main__ as tool
from bench.gpu.serve import measure, tools
from tests.unit.bench.gpu_serve.stub import Script, StubServer

Run = Callable[..., int]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    script = Script()
    monkeypatch.setattr(StubServer, "script", script, raising=False)
    monkeypatch.setattr(measure, "Server", StubServer)
    monkeypatch.setattr(tools, "Server", StubServer)
    return script


@pytest.fixture
def server(script: Script, tmp_path: Path) -> Iterator[StubServer]:
    """One that serves with our worker, adaptive."""
    server = StubServer("m", "d", log_dir=tmp_path)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def run(script: Script, tmp_path: Path) -> Run:
    """Runs the tool on the MoE pair, a few requests; further arguments are the test's."""

    def run(*arguments: str) -> int:
        common = ["--cpu", "--pairs", "moe", "--requests", "3", "--new-tokens", "9"]
        return tool.main([*common, "--out", str(tmp_path / "out"), *arguments])

    return run


@pytest.fixture
def results(tmp_path: Path) -> Callable[[], Any]:
    return lambda: json.loads((tmp_path / "out" / "results.json").read_text())
