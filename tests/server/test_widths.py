"""The verify width changes how fast an answer comes, never the answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.harness import checkpoints, scripts
from bench.harness.features import ARGS, FEATURES, PLAIN_ARGS, same
from bench.harness.requests import ask, ask_all, essence, greedy
from bench.harness.servers import TestedServer, settings
from dflash_sglang import zoo
from launch import load
from tests.server.conftest import MAX_NEW_TOKENS, Reference

BLOCK = 16
NAMES = (  # of features whose state follows the width of a step
    "temperature",
    "frequency penalty",
    "min_new_tokens with stop tokens",
    "JSON schema",
    "input, top and chosen logprobs",
    "stop string",
    "custom logit processor",
)


@pytest.fixture(scope="module")
def random_widths(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestedServer]:
    """DFLASH with every feature switched on and another width each step."""
    pair, folder = zoo.path("moe"), tmp_path_factory.mktemp("random-widths")
    env = scripts.plugin_environment(folder / "plugin", "random_widths")
    args = [*ARGS, "--page-size", "16"]
    with TestedServer(pair.verifier, pair.drafter, args=args, env=env, log_dir=folder) as server:
        yield server


@pytest.mark.parametrize("concurrency", [1, 8, 32])
def test_random_widths_change_no_answer(
    random_widths: TestedServer, reference: Reference, concurrency: int
) -> None:
    done = load.run(random_widths, reference.prompts, concurrency, MAX_NEW_TOKENS)
    random_widths.check_rest()
    assert [a.output_ids for a in done.answers] == [a.output_ids for a in reference.answers]
    # Some steps drafted, some did not.
    assert 1.5 < load.tau(done.answers) < 8


def test_random_widths_change_no_feature(
    random_widths: TestedServer, prompts: list[str], tmp_path: Path
) -> None:
    features = [feature for feature in FEATURES if feature.name in NAMES]
    assert len(features) == len(NAMES)
    asked = [
        feature.payload(prompt, number)
        for number, prompt in enumerate(prompts[:8])
        for feature in features
    ]
    verifier = zoo.path("moe").verifier
    with TestedServer(verifier, args=PLAIN_ARGS, log_dir=tmp_path) as plain:
        expected = [ask(plain, payload) for payload in asked]
    got = ask_all(random_widths, asked, concurrency=16)
    random_widths.check_rest()
    differing = [i for i, pair in enumerate(zip(expected, got, strict=True)) if not same(*pair)]
    assert differing == []


@pytest.mark.parametrize("width", [1, 3])
def test_a_forced_width(reference: Reference, tmp_path: Path, width: int) -> None:
    pair = zoo.path("moe")
    args = settings(tmp_path / "settings.json", width="fixed", max_width=width)
    with TestedServer(pair.verifier, pair.drafter, args=args, log_dir=tmp_path) as server:
        done = load.run(server, reference.prompts, 8, MAX_NEW_TOKENS)
        server.check_rest()
    assert [a.output_ids for a in done.answers] == [a.output_ids for a in reference.answers]
    tau = load.tau(done.answers)
    assert tau <= width
    assert tau > 0.7 * width


def test_the_policy_changes_no_answer(reference: Reference, tmp_path: Path) -> None:
    pair = zoo.path("moe")
    with TestedServer(pair.verifier, pair.drafter, log_dir=tmp_path) as server:
        for concurrency in (1, 8, 32):
            done = load.run(server, reference.prompts, concurrency, MAX_NEW_TOKENS)
            server.check_rest()
            assert [a.output_ids for a in done.answers] == [a.output_ids for a in reference.answers]
            assert load.tau(done.answers) > 2
        assert server.server_info()["internal_states"][0]["dflash"]["width"] == "adaptive"


def test_a_useless_drafter_is_left_alone(reference: Reference, tmp_path: Path) -> None:
    drafter = checkpoints.random_drafter(tmp_path / "random")
    with TestedServer(zoo.path("moe").verifier, drafter, log_dir=tmp_path / "log") as server:
        done = load.run(server, reference.prompts, 8, MAX_NEW_TOKENS)
        again = load.run(server, reference.prompts, 8, MAX_NEW_TOKENS)
        server.check_rest()
        info = server.server_info()
    expected = [answer.output_ids for answer in reference.answers]
    assert [a.output_ids for a in done.answers] == expected
    assert [a.output_ids for a in again.answers] == expected
    state = info["internal_states"][0]["dflash"]
    assert state["width"] == "adaptive"
    # Which of the two narrowest is faster by a hair, a busy machine cannot tell.
    steps = {int(width): count for width, count in state["steps_by_width"].items()}
    assert steps[1] + steps[2] > 0.8 * sum(steps.values())
    assert steps[1] > 0


def wish(prompt: str, **wishes: object) -> dict[str, Any]:
    return greedy(prompt, MAX_NEW_TOKENS, custom_params={"dflash": wishes})


def test_a_request_may_limit_itself(dflash: TestedServer, reference: Reference) -> None:
    prompts = reference.prompts[:12]
    cases: dict[str, dict[str, Any]] = {
        "free": {},
        "four": {"max_width": 4},
        "one": {"max_width": 1},
        "none": {"speculative": False},
    }
    asked = [wish(prompt, **wishes) for prompt in prompts for wishes in cases.values()]
    got = ask_all(dflash, asked, concurrency=12)
    for number, answer in enumerate(got):
        expected = reference.answers[number // len(cases)]
        assert tuple(answer["output_ids"]) == expected.output_ids
    rates = {}
    for place, name in enumerate(cases):
        meta = [answer["meta_info"] for answer in got[place :: len(cases)]]
        tokens = sum(one["completion_tokens"] - 1 for one in meta)
        rates[name] = tokens / sum(one["spec_verify_ct"] for one in meta)
    assert rates["one"] == rates["none"] == 1
    assert 1 < rates["four"] <= 4
    assert rates["free"] > rates["four"]


@pytest.mark.parametrize(
    "wishes",
    [{"max_width": 0}, {"max_width": "wide"}, {"speculative": 1}, {"width": 4}],
    ids=str,
)
def test_a_bad_wish_is_refused(
    dflash: TestedServer, reference: Reference, wishes: dict[str, Any]
) -> None:
    prompt = reference.prompts[0]
    bad, good = ask_all(dflash, [wish(prompt, **wishes), wish(prompt)], concurrency=2)
    status, body = bad
    assert status == 400
    assert "custom_params['dflash']" in body
    assert essence(good)["output_ids"] == list(reference.answers[0].output_ids)
