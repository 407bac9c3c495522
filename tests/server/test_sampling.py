"""The distribution of sampled answers, for every accept rule, against the verifier's own law.

bench/exactness/draws.py makes the same comparison with 20,100 draws a rule; here are fewer.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.harness import scripts
from bench.harness.draw_tests import BLOCK_ARGS, REJECT, Sampling, context, draw, law, p_value
from bench.harness.requests import ask_all, greedy
from bench.harness.servers import TestedServer, settings
from bench.harness.verifier_distribution import Witness
from dflash_sglang import zoo
from tests.server.conftest import MAX_NEW_TOKENS, Reference

DRAWS = 1200
BLOCK_VERIFICATION = (*BLOCK_ARGS, "--speculative-use-block-verification")
RELAXED = (*BLOCK_ARGS, "--speculative-accept-threshold-acc", "0.4")


def fixed(folder: Path) -> list[str]:
    """A drafted block is verified whole: a mistake shows in what is drafted."""
    return settings(folder / "settings.json", width="fixed")


@pytest.fixture(scope="module")
def witness() -> Witness:
    return Witness()


@pytest.fixture(scope="module")
def ids(witness: Witness) -> list[int]:
    return context(witness)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(top_k=6, top_p=0.9), Sampling(min_p=0.02)],
    ids=["temperature", "top-k and top-p", "min-p"],
)
def test_sample_and_match_follows_the_verifiers_law(
    dflash: TestedServer, witness: Witness, ids: list[int], sampling: Sampling
) -> None:
    got = draw(dflash, ids, DRAWS, sampling)
    assert got.tau > 1.2  # drafts were accepted, else this proves nothing
    assert p_value(got.counts, law(witness, ids, sampling)) > REJECT
    # The test can tell: another temperature is another law.
    hotter = law(witness, ids, sampling._replace(temperature=3.2))
    assert p_value(got.counts, hotter) < REJECT


@pytest.fixture(scope="module")
def block_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestedServer]:
    """Sampled drafts, accepted by block verification."""
    pair, folder = zoo.path("moe"), tmp_path_factory.mktemp("block")
    args = [*BLOCK_VERIFICATION, *fixed(folder)]
    with TestedServer(pair.verifier, pair.drafter, args=args, log_dir=folder) as server:
        yield server


def test_block_verification_follows_the_verifiers_law(
    block_server: TestedServer, witness: Witness, ids: list[int]
) -> None:
    for sampling in (Sampling(), Sampling(top_k=6, top_p=0.9)):
        got = draw(block_server, ids, DRAWS, sampling)
        assert got.tau > 1.2
        assert p_value(got.counts, law(witness, ids, sampling)) > REJECT
    block_server.check_rest()


def test_greedy_requests_match_beside_sampled_ones(
    block_server: TestedServer, reference: Reference
) -> None:
    payloads = [greedy(prompt, MAX_NEW_TOKENS) for prompt in reference.prompts]
    sampled = [greedy(prompt, 40, temperature=2.0) for prompt in reference.prompts]
    mixed = [one for pair in zip(payloads, sampled, strict=True) for one in pair]
    got = ask_all(block_server, mixed, concurrency=16)[::2]
    assert [tuple(one["output_ids"]) for one in got] == [
        answer.output_ids for answer in reference.answers
    ]
    block_server.check_rest()


def test_a_mistake_in_the_rule_is_noticed(witness: Witness, ids: list[int], tmp_path: Path) -> None:
    pair = zoo.path("moe")
    env = scripts.wrong_rule(tmp_path / "plugin", "bonus")
    args = [*BLOCK_VERIFICATION, *fixed(tmp_path)]
    with TestedServer(pair.verifier, pair.drafter, args=args, env=env, log_dir=tmp_path) as server:
        got = draw(server, ids, DRAWS)
    assert p_value(got.counts, law(witness, ids)) < REJECT


def test_relaxed_thresholds_are_announced_and_served(
    witness: Witness, ids: list[int], tmp_path: Path
) -> None:
    pair = zoo.path("moe")
    args = [*RELAXED, *fixed(tmp_path)]
    with TestedServer(pair.verifier, pair.drafter, args=args, log_dir=tmp_path) as server:
        announced = server.log_path.read_text()
        got = draw(server, ids, DRAWS)
        log = server.log_path.read_text()
    assert "not exact, another distribution is served" in announced  # before any request
    assert log.count("not exact, another distribution is served") == 1
    assert p_value(got.counts, law(witness, ids)) < REJECT
