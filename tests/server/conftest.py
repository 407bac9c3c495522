"""Servers shared by the tests of a session, and the rule that each test leaves them at rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from bench.harness.servers import TestedServer, settings
from dflash_sglang import zoo
from launch import load
from launch.client import Answer
from launch.comparison import choose_prompts

MAX_NEW_TOKENS = 96
NUM_PROMPTS = 40


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/server/" in str(item.path):
            item.add_marker(pytest.mark.server)


class Reference(NamedTuple):
    """What plain decoding says, which every other way to serve must say too."""

    prompts: list[str]
    answers: tuple[Answer, ...]


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """Held-out prompts, the families in turn."""
    return [prompt.text for prompt in choose_prompts("moe", NUM_PROMPTS)]


@pytest.fixture(scope="session")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestedServer, TestedServer]]:
    """The plain server and the main DFLASH server, started side by side."""
    pair = zoo.path("moe")
    logs = tmp_path_factory.mktemp("servers")
    plain = TestedServer(pair.verifier, log_dir=logs / "plain")
    # Tests count verifies; what the policy does to answers is in test_widths and test_features.
    fixed = settings(logs / "settings.json", width="fixed")
    dflash = TestedServer(pair.verifier, pair.drafter, args=fixed, log_dir=logs / "dflash")
    try:
        plain.start()
        dflash.start()
        plain.wait_ready()
        dflash.wait_ready()
        yield plain, dflash
    finally:
        plain.stop()
        dflash.stop()


@pytest.fixture(scope="session")
def plain_server(both: tuple[TestedServer, TestedServer]) -> TestedServer:
    return both[0]


@pytest.fixture(scope="session")
def dflash_server(both: tuple[TestedServer, TestedServer]) -> TestedServer:
    return both[1]


@pytest.fixture
def plain(plain_server: TestedServer) -> TestedServer:
    """The verifier alone: every answer is compared with its."""
    return plain_server


@pytest.fixture
def dflash(dflash_server: TestedServer) -> Iterator[TestedServer]:
    """Block 16, page 1, verified whole; after the test it must be idle with every slot free."""
    yield dflash_server
    dflash_server.check_rest()


@pytest.fixture(scope="session")
def reference(plain_server: TestedServer, prompts: list[str]) -> Reference:
    return Reference(prompts, load.run(plain_server, prompts, 8, MAX_NEW_TOKENS).answers)
