"""The thread count: leave a core to the other processes, obey the variable, refuse garbage."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dflash_sglang.cpu import threads
from dflash_sglang.cpu.threads import VARIABLE, choose_threads, physical_cores
from dflash_sglang.errors import PlatformError


@pytest.mark.parametrize(
    ("cores", "ranks", "count"), [(1, 1, 1), (2, 1, 1), (4, 1, 3), (8, 2, 3), (4, 8, 1)]
)
def test_default_leaves_a_core_to_the_other_processes(cores: int, ranks: int, count: int) -> None:
    choice = choose_threads({}, cores, ranks)
    assert choice.threads == count
    assert str(cores) in choice.reason


def test_variable_decides() -> None:
    choice = choose_threads({VARIABLE: "6"}, cores=2)
    assert choice.threads == 6
    assert VARIABLE in choice.reason


@pytest.mark.parametrize("given", ["0", "-1", "two", "1.5", "", " 2", "²"])
def test_garbage_is_refused(given: str) -> None:
    with pytest.raises(PlatformError, match=VARIABLE):
        choose_threads({VARIABLE: given}, cores=2)


def test_hyper_threads_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(threads, "_siblings", lambda cpu: f"{cpu % 2},{cpu % 2 + 2}")
    monkeypatch.setattr(threads, "_quota", lambda _: 64)
    assert physical_cores() == 2


@pytest.mark.parametrize(
    ("content", "cores"), [("max 100000", 4), ("250000 100000", 2), ("50000 100000", 1)]
)
def test_container_quota(
    content: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(content)
    read = threads._quota
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(threads, "_siblings", str)
    monkeypatch.setattr(threads, "_quota", lambda _: read(file))
    assert physical_cores() == cores


def test_machine_without_control_groups(tmp_path: Path) -> None:
    assert threads._quota(tmp_path / "absent") > 1000
