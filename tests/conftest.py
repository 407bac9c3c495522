"""No accelerator for any test; how the suite is dealt to two processes; how many servers start."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from launch import devices

# Before anything asks torch: on a machine with a GPU the tests run as on one without.
devices.hide(os.environ)

TESTS = Path(__file__).parent
# With `-n 2` a group runs in one process, one test after another, so that it starts its servers
# once. By folder or file, the longest first; every other file is a group of its own.
GROUPS = (
    ("server",),  # of the MoE pair
    ("server/test_hybrid.py",),
    ("server/test_vision.py",),
    ("unit/step/recurrent/test_replay_kernels.py",),
    ("kernels/compile",),
    ("kernels/test_interpreted.py",),
    ("unit/bench/test_gpu_check.py",),
    ("unit/preflight/test_pair_wheel.py",),
)
STARTS = pytest.StashKey[int]()


def is_in(file: str, members: Iterable[str]) -> bool:
    return any(file == member or file.startswith(f"{member}/") for member in members)


def group_of(file: str) -> tuple[int, str]:
    """Rank and name of the group of a test file, given relative to tests/: the last that has it."""
    ranks = [rank for rank, members in enumerate(GROUPS) if is_in(file, members)]
    return (ranks[-1], GROUPS[ranks[-1]][0]) if ranks else (len(GROUPS), file)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    files = {item: item.path.relative_to(TESTS).as_posix() for item in items}
    for item, file in files.items():
        if is_in(file, ["server"]):
            item.add_marker(pytest.mark.server)
    items.sort(key=lambda item: group_of(files[item])[0])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid.partition("::")[0].removeprefix("tests/"))[1]

    config.option.loadscopereorder = False  # they are in order
    return ByGroup(config, log)


def server_starts() -> int:
    servers = sys.modules.get("bench.harness.servers")  # not imported for a unit test's sake
    return servers.TestedServer.starts if servers else 0


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist hands its count to the process that reports."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["server_starts"] = server_starts()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    stash = node.config.stash
    stash[STARTS] = stash.get(STARTS, 0) + getattr(node, "workeroutput", {}).get("server_starts", 0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    starts = config.stash.get(STARTS, 0) + server_starts()
    if starts:
        terminalreporter.write_line(f"server starts: {starts}")
