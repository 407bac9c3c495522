"""memcheck and a trace, with programs that only pretend to be NVIDIA's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.gpu.serve import tools
from tests.unit.bench.gpu_serve.stub import Script, StubServer

ONE = ("--concurrency", "1", "--configurations", "plain")


def program(folder: Path, name: str) -> Path:
    file = folder / name
    file.write_text("#!/bin/sh\n")
    file.chmod(0o755)
    return file


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return folder


@pytest.mark.parametrize(
    ("flag", "name"), [("--sanitizer", "compute-sanitizer"), ("--trace", "nsys")]
)
def test_a_tool_that_is_missing_is_named_and_can_follow_later(
    run: Callable[..., int],
    results: Callable[[], Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flag: str,
    name: str,
) -> None:
    monkeypatch.setattr(tools, "find", lambda _: None)
    assert run(*ONE, flag) == 0
    assert f"{name} is not found: put it on PATH" in capsys.readouterr().err
    assert results()["tools"] == []


@pytest.mark.parametrize(("errors", "found"), [(0, "0 errors"), (3, "3 errors; please send")])
def test_memcheck_counts_its_errors(
    run: Callable[..., int],
    results: Callable[[], Any],
    script: Script,
    on_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    errors: int,
    found: str,
) -> None:
    path = program(on_path, "compute-sanitizer")

    class Checked(StubServer):
        def stop(self) -> None:
            log = Path(self.command[self.command.index("--log-file") + 1])
            log.write_text(f"========= ERROR SUMMARY: {errors} errors\n")
            super().stop()

    monkeypatch.setattr(tools, "Server", Checked)
    run(*ONE, "--sanitizer")
    (row,) = results()["tools"]
    assert row["found"].startswith(found)
    server = script.started[-1]
    assert server.command[0] == str(path)
    assert server.settings == {"width": "fixed"}
    assert server.env["SGLANG_ENABLE_ASYNC_ASSERT"] == "1"


def test_a_trace_of_both_widths(
    run: Callable[..., int],
    results: Callable[[], Any],
    script: Script,
    on_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program(on_path, "nsys")
    asked: list[Any] = []

    class Traced(StubServer):
        def open(self, path: str, payload: object = None, timeout: float = 9.0) -> Any:
            if path == "/start_profile":
                asked.append(payload)
                (output,) = (word for word in self.command if word.startswith("--output="))
                Path(output.partition("=")[2]).write_text("")
            return super().open(path, payload, timeout)

    monkeypatch.setattr(tools, "Server", Traced)
    run(*ONE, "--trace")
    assert [row["width"] for row in results()["tools"]] == ["fixed", "adaptive"]
    assert all(row["found"].startswith("50 steps in") for row in results()["tools"])
    assert asked == [{"activities": ["CUDA_PROFILER"], "num_steps": 50}] * 2


def test_a_server_that_fails_under_a_tool_is_a_row(
    run: Callable[..., int], results: Callable[[], Any], script: Script, on_path: Path
) -> None:
    program(on_path, "nsys")
    script.fails = dict.fromkeys(["fixed", "adaptive"], "no permission for performance counters")
    run(*ONE, "--trace")
    assert all("the server failed under it" in row["found"] for row in results()["tools"])


def test_a_trace_that_is_not_written_is_said(
    run: Callable[..., int],
    results: Callable[[], Any],
    on_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program(on_path, "nsys")
    monkeypatch.setattr(tools, "WRITTEN_WITHIN", 0)
    run(*ONE, "--trace")
    assert "was not written" in results()["tools"][0]["found"]
