"""Which worker serves: ours, or SGLang's own with a line that gives the reason."""

import ast
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.arg_groups import resolution_hooks
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from dflash_sglang import hooks, plugin
from dflash_sglang.config import WORKER_VARIABLE
from dflash_sglang.errors import ConfigError, PairError
from dflash_sglang.preflight.pair import Finding, HeadFamily, PairReport
from dflash_sglang.preflight.pair.report import error
from dflash_sglang.preflight.version import SGLANG_VERSION
from tests.support.server_flags import server_flags

BUILTIN = object()


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Targets that get hooked, without touching the process."""
    targets: list[str] = []
    monkeypatch.setattr(
        HookRegistry, "register", lambda target, *args, **kwargs: targets.append(target)
    )
    return targets


@pytest.fixture
def plain_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    pair_of(monkeypatch, HeadFamily.PLAIN)


def pair_of(monkeypatch: pytest.MonkeyPatch, family: HeadFamily, *findings: Finding) -> None:
    """Let the pair check return this instead of reading files."""
    report = PairReport("verifier", "drafter", family, findings)
    monkeypatch.setattr(hooks, "resolving_view", lambda server_args: server_args)
    monkeypatch.setattr(hooks, "pair_report", lambda flags: report)


def builtin_worker(*_: Any) -> object:
    return BUILTIN


@pytest.mark.parametrize("version", ["0.5.22", "0.5.24", None])
def test_another_release_is_left_alone_with_a_line(
    version: str | None,
    registered: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(plugin, "installed_version", lambda: version)
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert registered == []
    (line,) = caplog.messages
    assert "inactive, SGLang's own DFLASH worker serves" in line
    assert (version or "not installed") in line
    assert SGLANG_VERSION in line


def test_a_start_reads_no_source(registered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The pinned version answers for the names; `check` looks them up."""
    read: list[object] = []
    monkeypatch.setattr(ast, "parse", lambda *args, **options: read.append(args))
    monkeypatch.setattr(resolution_hooks, "_HOOKS", {})
    plugin.register()
    assert registered == [hook.target for hook in hooks.PROCESS_HOOKS]
    assert "handle_speculative_decoding" in resolution_hooks._HOOKS
    assert read == []


def test_another_algorithm_keeps_its_worker(registered: list[str]) -> None:
    got = hooks.create_worker(builtin_worker, SpeculativeAlgorithm.NGRAM, SimpleNamespace())
    assert got is BUILTIN
    assert registered == []


@pytest.mark.usefixtures("plain_pair")
def test_the_variable_selects_sglangs_worker(
    registered: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(WORKER_VARIABLE, "builtin")
    with caplog.at_level(logging.WARNING):
        got = hooks.create_worker(builtin_worker, SpeculativeAlgorithm.DFLASH, server_flags())
    assert got is BUILTIN
    assert registered == []
    assert "SGLang's own worker" in caplog.text
    assert WORKER_VARIABLE in caplog.text


@pytest.mark.usefixtures("plain_pair")
def test_an_unknown_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKER_VARIABLE, "fast")
    with pytest.raises(ConfigError, match=r"'fast'.*dflash, builtin"):
        hooks.create_worker(builtin_worker, SpeculativeAlgorithm.DFLASH, server_flags())


@pytest.mark.parametrize(
    "family", [HeadFamily.DFLASH2, HeadFamily.DOMINO, HeadFamily.LILICORR, HeadFamily.NEMOTRON]
)
def test_other_heads_go_to_sglangs_worker_with_a_line(
    family: HeadFamily,
    registered: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pair_of(monkeypatch, family)
    with caplog.at_level(logging.WARNING):
        got = hooks.create_worker(builtin_worker, SpeculativeAlgorithm.DFLASH, server_flags())
    assert got is BUILTIN
    assert registered == []
    assert family.value in caplog.text


def test_a_pair_that_cannot_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pair_of(
        monkeypatch, HeadFamily.PLAIN, error("taps", "a tap is the last layer", "5", "Retrain.")
    )
    with pytest.raises(PairError, match="a tap is the last layer"):
        hooks.create_worker(builtin_worker, SpeculativeAlgorithm.DFLASH, server_flags())
