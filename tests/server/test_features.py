"""Every sampling feature, alone and all of them in one batch, as the verifier answers alone."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from bench.harness.features import ARGS, FEATURES, PLAIN_ARGS, Feature, same
from bench.harness.requests import ask, ask_all, essence, greedy
from bench.harness.servers import TestedServer
from dflash_sglang import zoo

NUM_PROMPTS = 24
# Features that only show when they change the answer, and in how many of the prompts at least.
MUST_CHANGE = {
    "temperature": 8,
    "repetition penalty": 16,
    "frequency penalty": 16,
    "presence penalty": 4,
    "min_new_tokens": 8,
    "regex": 20,
    "logit_bias": 2,
    "custom logit processor": 4,
}

Answers = dict[str, list[Any]]


@pytest.fixture(scope="module")
def servers(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[TestedServer, TestedServer]]:
    """Plain without overlap, and DFLASH, with the same features switched on."""
    pair, logs = zoo.path("moe"), tmp_path_factory.mktemp("features")
    plain = TestedServer(pair.verifier, args=PLAIN_ARGS, log_dir=logs / "plain")
    ours = TestedServer(pair.verifier, pair.drafter, args=ARGS, log_dir=logs / "dflash")
    try:
        plain.start()
        ours.start()
        plain.wait_ready()
        ours.wait_ready()
        yield plain, ours
    finally:
        plain.stop()
        ours.stop()


@pytest.fixture(scope="module")
def expected(servers: tuple[TestedServer, TestedServer], prompts: list[str]) -> Answers:
    """Plain decoding, one request at a time."""
    plain, _ = servers
    return {
        feature.name: [
            ask(plain, feature.payload(prompt, number), feature.path)
            for number, prompt in enumerate(prompts[:NUM_PROMPTS])
        ]
        for feature in FEATURES
    }


@pytest.fixture(scope="module")
def mixed(servers: tuple[TestedServer, TestedServer], prompts: list[str]) -> Answers:
    """DFLASH, every feature in flight at once."""
    _, ours = servers
    jobs = [
        (feature, number, prompt)
        for number, prompt in enumerate(prompts[:NUM_PROMPTS])
        for feature in FEATURES
    ]

    def send(job: tuple[Feature, int, str]) -> Any:
        feature, number, prompt = job
        return ask(ours, feature.payload(prompt, number), feature.path)

    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(send, jobs))
    ours.check_rest()
    found: Answers = {feature.name: [] for feature in FEATURES}
    for (feature, _, _), answer in zip(jobs, answers, strict=True):
        found[feature.name].append(answer)
    return found


def differing(expected: list[Any], got: list[Any]) -> list[int]:
    return [i for i, pair in enumerate(zip(expected, got, strict=True)) if not same(*pair)]


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_a_feature_alone(
    servers: tuple[TestedServer, TestedServer],
    expected: Answers,
    prompts: list[str],
    feature: Feature,
) -> None:
    _, ours = servers
    payloads = [feature.payload(p, number) for number, p in enumerate(prompts[:NUM_PROMPTS])]
    got = ask_all(ours, payloads, concurrency=16, path=feature.path)
    assert not any(isinstance(answer, tuple) for answer in got)  # an error status
    assert differing(expected[feature.name], got) == []
    ours.check_rest()


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_a_feature_among_all_others(expected: Answers, mixed: Answers, feature: Feature) -> None:
    assert differing(expected[feature.name], mixed[feature.name]) == []


@pytest.mark.parametrize("name", MUST_CHANGE)
def test_a_feature_matters(expected: Answers, name: str) -> None:
    plain = "ignore_eos" if "penalty" in name else "greedy"
    changed = sum(
        answer["output_ids"] != other["output_ids"]
        for answer, other in zip(expected[name], expected[plain], strict=True)
    )
    assert changed >= MUST_CHANGE[name]


def test_a_comparison_can_fail(expected: Answers) -> None:
    greedy_answers, seeded = expected["greedy"], expected["temperature"]
    assert differing(greedy_answers, seeded) != []
    assert differing(expected["logprobs"], expected["logprobs at temperature"]) != []


def test_speculation_took_part(mixed: Answers) -> None:
    meta = [one["meta_info"] for answers in mixed.values() for one in answers if "meta_info" in one]
    tokens = sum(one["completion_tokens"] for one in meta)
    assert tokens > 1.3 * sum(one.get("spec_verify_ct", 0) for one in meta)


def test_min_p_with_a_seed_is_refused_and_the_server_lives(
    servers: tuple[TestedServer, TestedServer], prompts: list[str]
) -> None:
    _, ours = servers
    sampled = {"temperature": 1.0, "min_p": 0.1, "sampling_seed": 3}
    status, body = ask(ours, greedy(prompts[0], 8, **sampled))
    assert status == 400
    assert "min_p=0.1" in body
    assert essence(ask(ours, greedy(prompts[1], 8)))["completion_tokens"] > 0
