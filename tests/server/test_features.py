"""Every sampling feature, alone and all of them in one batch, as the verifier answers alone.

bench/exactness/features.py makes the same comparison with 24 prompts a feature.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from bench.harness import scripts
from bench.harness.features import FEATURES, Feature, same
from bench.harness.requests import essence, greedy, send, send_all
from bench.harness.servers import TestedServer

NUM_PROMPTS = 8
# Features that only show when they change the answer, and in how many of the prompts at least.
MUST_CHANGE = {
    "temperature": 3,
    "repetition penalty": 6,
    "frequency penalty": 6,
    "presence penalty": 2,
    "min_new_tokens": 3,
    "regex": 7,
    "logit_bias": 1,
    "custom logit processor": 1,
}
FOLLOWS_WIDTH = (  # features whose state follows the width of a step
    "temperature",
    "frequency penalty",
    "min_new_tokens with stop tokens",
    "JSON schema",
    "input, top and chosen logprobs",
    "stop string",
    "custom logit processor",
)

Answers = dict[str, list[Any]]


@pytest.fixture(scope="module")
def expected(plain: TestedServer, prompts: list[str]) -> Answers:
    """Plain decoding, one request at a time."""
    return {
        feature.name: [
            send(plain, feature.payload(prompt, number), feature.path)
            for number, prompt in enumerate(prompts[:NUM_PROMPTS])
        ]
        for feature in FEATURES
    }


@pytest.fixture(scope="module")
def mixed(features_server: TestedServer, prompts: list[str]) -> Answers:
    """DFLASH, every feature in flight at once."""
    jobs = [
        (feature, number, prompt)
        for number, prompt in enumerate(prompts[:NUM_PROMPTS])
        for feature in FEATURES
    ]

    def answer_to(job: tuple[Feature, int, str]) -> Any:
        feature, number, prompt = job
        return send(features_server, feature.payload(prompt, number), feature.path)

    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(answer_to, jobs))
    features_server.check_idle()
    found: Answers = {feature.name: [] for feature in FEATURES}
    for (feature, _, _), answer in zip(jobs, answers, strict=True):
        found[feature.name].append(answer)
    return found


def differing(expected: list[Any], got: list[Any]) -> list[int]:
    return [i for i, pair in enumerate(zip(expected, got, strict=True)) if not same(*pair)]


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_a_feature_alone(
    adaptive: TestedServer, expected: Answers, prompts: list[str], feature: Feature
) -> None:
    payloads = [feature.payload(p, number) for number, p in enumerate(prompts[:NUM_PROMPTS])]
    got = send_all(adaptive, payloads, concurrency=16, path=feature.path)
    assert not any(isinstance(answer, tuple) for answer in got)  # an error status
    assert differing(expected[feature.name], got) == []


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_a_feature_among_all_others(expected: Answers, mixed: Answers, feature: Feature) -> None:
    assert differing(expected[feature.name], mixed[feature.name]) == []


def test_random_widths_change_no_feature(
    adaptive: TestedServer, expected: Answers, prompts: list[str]
) -> None:
    features = [feature for feature in FEATURES if feature.name in FOLLOWS_WIDTH]
    assert len(features) == len(FOLLOWS_WIDTH)
    jobs = [
        (feature, number, prompt)
        for number, prompt in enumerate(prompts[:NUM_PROMPTS])
        for feature in features
    ]
    payloads = [
        {
            **feature.payload(prompt, number),
            "rid": scripts.random_width(f"{feature.name} {number}"),
        }
        for feature, number, prompt in jobs
    ]
    got = send_all(adaptive, payloads, concurrency=16)
    wanted = [expected[feature.name][number] for feature, number, _ in jobs]
    assert differing(wanted, got) == []


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
    adaptive: TestedServer, prompts: list[str]
) -> None:
    sampled = {"temperature": 1.0, "min_p": 0.1, "sampling_seed": 3}
    status, body = send(adaptive, greedy(prompts[0], 8, **sampled))
    assert status == 400
    assert "min_p=0.1" in body
    assert essence(send(adaptive, greedy(prompts[1], 8)))["completion_tokens"] > 0
