"""What is private stays on the machine: planted in a log, and looked for in the archive."""

from __future__ import annotations

import getpass
import socket
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.gpu.serve import archive
from bench.gpu.serve.archive import Redactor
from tests.unit.bench.gpu_serve.stub import SECRET_PATH, Script

KEY = "hf_" + "a" * 30
ADDRESS = "10.1.2.3"
PLANTED = (SECRET_PATH, KEY, ADDRESS, "my-api-key", "some-host", "someuser")


@pytest.fixture
def redact() -> Redactor:
    return Redactor({"some-host": "<host>", "someuser": "<user>", "/data/out": "<out>"})


def test_what_is_planted_in_a_log_is_not_in_the_archive(
    run: Callable[..., int], script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "some-host")
    monkeypatch.setattr(getpass, "getuser", lambda: "someuser")
    monkeypatch.setenv("SGLANG_API_KEY", "my-api-key")
    script.log = (
        f"api_key='my-api-key', token {KEY} at {ADDRESS} on some-host for someuser\n"
        f"loading {SECRET_PATH}/weights.safetensors"
    )
    script.fails["fixed"] = f"RuntimeError: cannot read {SECRET_PATH} on some-host"
    run("--concurrency", "1", "--configurations", "plain", "fixed")
    with zipfile.ZipFile(tmp_path / "out" / "report.zip") as written:
        texts = {name: written.read(name).decode() for name in written.namelist()}
    assert "logs/moe-fixed/server.log" in texts
    assert "RuntimeError: cannot read" in texts["results.json"]
    for name, text in texts.items():
        found = [secret for secret in (*PLANTED, str(tmp_path)) if secret in text]
        assert found == [], name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("POST /generate HTTP/1.1", "POST /generate HTTP/1.1"),
        ("12.5 tokens/s, 3/4 of them", "12.5 tokens/s, 3/4 of them"),
        ("http://127.0.0.1:30000/v1/models", "http://127.0.0.1:30000/v1/models"),
        ('File "/data/out/logs/x.log"', 'File "<out>/logs/x.log"'),
        ("see /opt/models/x/config.json now", "see <path> now"),
        ("('/opt/models/x',)", "('<path>',)"),
        ("some-hosts and some-host", "some-hosts and <host>"),
        ("hf_token='abc', tp_size=1", "hf_token='<secret>', tp_size=1"),
        ("'api_key': 'abc'", "'api_key': '<secret>'"),
        ('{"api_key": "abc", "b": "c"}', '{"api_key": "<secret>", "b": "c"}'),
        ("api_key=None", "api_key=None"),
        ("from 192.168.1.20:5000", "from <address>:5000"),
        ("CUDA 13.0.2.13.1", "CUDA 13.0.2.13.1"),
    ],
)
def test_redaction(redact: Redactor, text: str, expected: str) -> None:
    assert redact(text) == expected


def test_variables_with_secrets_are_named_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SOME_TOKEN", "abc")
    monkeypatch.setenv("SGLANG_OTHER", "1")
    monkeypatch.setenv("UNRELATED", "2")
    variables = archive.environment_variables()
    assert variables["SGLANG_SOME_TOKEN"] == "<secret>"
    assert variables["SGLANG_OTHER"] == "1"
    assert "UNRELATED" not in variables
