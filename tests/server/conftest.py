"""The servers that several modules share, and the rule that each test leaves them idle."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.harness import scripts
from bench.harness.features import ARGS, PLAIN_ARGS
from bench.harness.scripts import Continuation
from bench.harness.servers import TestedServer, settings
from bench.harness.verifier_distribution import ReferenceModel
from dflash_sglang import zoo
from launch import load
from launch.comparison import choose_prompts
from tests.support.reference import MAX_NEW_TOKENS, Reference

NUM_PROMPTS = 40


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """Held-out prompts, the families in turn."""
    return [prompt.text for prompt in choose_prompts("moe", NUM_PROMPTS)]


@pytest.fixture(scope="session")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestedServer, TestedServer]]:
    """The plain server and the main DFLASH server, started side by side."""
    pair = zoo.path("moe")
    logs = tmp_path_factory.mktemp("servers")
    plain = TestedServer(pair.verifier, args=PLAIN_ARGS, log_dir=logs / "plain")
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
def plain(both: tuple[TestedServer, TestedServer]) -> TestedServer:
    """The verifier alone, with every feature switched on: all answers are compared with its."""
    return both[0]


@pytest.fixture
def dflash(both: tuple[TestedServer, TestedServer]) -> Iterator[TestedServer]:
    """SGLang's defaults, blocks verified whole; idle with every slot free after each test."""
    _, dflash = both
    yield dflash
    dflash.check_idle()


@pytest.fixture(scope="session")
def features_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestedServer]:
    """Every feature switched on, page 16, widths by the policy or by a request's id."""
    pair, folder = zoo.path("moe"), tmp_path_factory.mktemp("features")
    # 3: neither a power of two nor a divisor of the page.
    widths = settings(folder / "settings.json", widths=[1, 2, 3, 4, 8, 12, 16])
    args = [*ARGS, "--page-size", "16", *widths]
    env = scripts.plugin_environment(folder / "plugin", "scripted_widths")
    with TestedServer(pair.verifier, pair.drafter, args=args, env=env, log_dir=folder) as server:
        yield server


@pytest.fixture
def adaptive(features_server: TestedServer) -> Iterator[TestedServer]:
    """`features_server`, idle with every slot free after each test."""
    yield features_server
    features_server.check_idle()


@pytest.fixture(scope="session")
def reference(plain: TestedServer, prompts: list[str]) -> Reference:
    return Reference(prompts, load.run(plain, prompts, 8, MAX_NEW_TOKENS).answers)


@pytest.fixture(scope="session")
def continuations(plain: TestedServer, prompts: list[str]) -> tuple[Continuation, ...]:
    """The reference's answers, past their ends."""
    return scripts.continuations(plain, prompts, MAX_NEW_TOKENS)


@pytest.fixture(scope="session")
def model() -> ReferenceModel:
    return ReferenceModel()
