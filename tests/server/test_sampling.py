"""The distribution of sampled answers, for every accept rule, against the verifier's own.

bench/exactness/draws.py makes the same comparison with 20,100 draws a rule; here are fewer.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.harness import scripts
from bench.harness.draw_tests import (
    BLOCK_ARGS,
    REJECT,
    Sampling,
    context,
    distribution,
    draw,
    p_value,
)
from bench.harness.requests import greedy, send_all
from bench.harness.servers import TestedServer, settings
from bench.harness.verifier_distribution import ReferenceModel
from dflash_sglang import zoo
from tests.support.reference import MAX_NEW_TOKENS, Reference

DRAWS = 1200
BLOCK_VERIFICATION = (*BLOCK_ARGS, "--speculative-use-block-verification")
NOT_EXACT = "not exact, another distribution is served"


@pytest.fixture(scope="module")
def ids(model: ReferenceModel) -> list[int]:
    return context(model)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(top_k=6, top_p=0.9), Sampling(min_p=0.02)],
    ids=["temperature", "top-k and top-p", "min-p"],
)
def test_sample_and_match_follows_the_verifiers_distribution(
    dflash: TestedServer, model: ReferenceModel, ids: list[int], sampling: Sampling
) -> None:
    got = draw(dflash, ids, DRAWS, sampling)
    assert got.tau > 1.2  # drafts were accepted, else this proves nothing
    assert p_value(got.counts, distribution(model, ids, sampling)) > REJECT
    # The test distinguishes temperatures, else it proves nothing.
    hotter = distribution(model, ids, sampling._replace(temperature=3.2))
    assert p_value(got.counts, hotter) < REJECT


@pytest.fixture(scope="module")
def block_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestedServer]:
    """Sampled drafts, accepted by block verification, or wrongly where a request names a mistake.

    A drafted block is verified whole: a mistake shows in what is drafted.
    """
    pair, folder = zoo.path("moe"), tmp_path_factory.mktemp("block")
    args = [*BLOCK_VERIFICATION, *settings(folder / "settings.json", width="fixed")]
    env = scripts.plugin_environment(folder / "plugin", "wrong_rules")
    with TestedServer(pair.verifier, pair.drafter, args=args, env=env, log_dir=folder) as server:
        yield server


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(top_k=6, top_p=0.9)], ids=["temperature", "top-k and top-p"]
)
def test_block_verification_follows_the_verifiers_distribution(
    block_server: TestedServer, model: ReferenceModel, ids: list[int], sampling: Sampling
) -> None:
    got = draw(block_server, ids, DRAWS, sampling)
    block_server.check_idle()
    assert got.tau > 1.2
    assert p_value(got.counts, distribution(model, ids, sampling)) > REJECT


def test_a_mistake_in_the_rule_is_noticed(
    block_server: TestedServer, model: ReferenceModel, ids: list[int]
) -> None:
    got = draw(block_server, ids, DRAWS, custom_params=scripts.wrong_rule("bonus"))
    assert p_value(got.counts, distribution(model, ids)) < REJECT


def test_greedy_requests_match_beside_sampled_ones(
    block_server: TestedServer, reference: Reference
) -> None:
    payloads = [greedy(prompt, MAX_NEW_TOKENS) for prompt in reference.prompts]
    sampled = [greedy(prompt, 40, temperature=2.0) for prompt in reference.prompts]
    mixed = [one for pair in zip(payloads, sampled, strict=True) for one in pair]
    got = send_all(block_server, mixed, concurrency=16)[::2]
    block_server.check_idle()
    assert [tuple(one["output_ids"]) for one in got] == reference.output_ids


def test_relaxed_thresholds_are_announced_and_served(
    dflash: TestedServer, model: ReferenceModel, ids: list[int]
) -> None:
    def set_threshold(value: float) -> None:
        changed = {"speculative_accept_threshold_acc": value}
        assert dflash.post("/set_internal_state", {"server_args": changed}) == [True]

    set_threshold(0.4)
    try:
        got = draw(dflash, ids, DRAWS)
    finally:
        set_threshold(1.0)
    exact = draw(dflash, ids, DRAWS)
    assert dflash.log_path.read_text().count(NOT_EXACT) == 1
    expected = distribution(model, ids)
    assert p_value(got.counts, expected) < REJECT
    assert p_value(exact.counts, expected) > REJECT
