"""The verify width changes how fast an answer comes, never the answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.harness import scripts
from bench.harness.requests import essence, greedy, send_all
from bench.harness.servers import TestedServer, measured_batches
from dflash_sglang import zoo
from launch import load
from launch.client import Answer
from tests.support.reference import MAX_NEW_TOKENS, Reference


def answers(
    server: TestedServer, reference: Reference, rids: list[str], concurrency: int
) -> list[Answer]:
    payloads = [
        {**greedy(prompt, MAX_NEW_TOKENS), "rid": rid}
        for prompt, rid in zip(reference.prompts, rids, strict=True)
    ]
    server.flush()
    return [Answer.parse(answer) for answer in send_all(server, payloads, concurrency)]


def steps_by_width(server: TestedServer) -> dict[int, int]:
    state = server.server_info()["internal_states"][0]["dflash"]
    return {int(width): steps for width, steps in state["steps_by_width"].items()}


@pytest.mark.parametrize("concurrency", [1, 8, 32])
def test_random_widths_change_no_answer(
    adaptive: TestedServer, reference: Reference, concurrency: int
) -> None:
    places = range(len(reference.prompts))
    rids = [scripts.random_width(f"{concurrency}.{place}") for place in places]
    got = answers(adaptive, reference, rids, concurrency)
    assert [answer.output_ids for answer in got] == reference.output_ids
    # Some steps drafted, some did not.
    assert 1.5 < load.tau(got) < 8


@pytest.mark.parametrize("width", [1, 3])
def test_a_forced_width(adaptive: TestedServer, reference: Reference, width: int) -> None:
    before = steps_by_width(adaptive)
    places = range(len(reference.prompts))
    rids = [scripts.forced_width(width, place) for place in places]
    got = answers(adaptive, reference, rids, 8)
    after = steps_by_width(adaptive)
    assert {one for one, steps in after.items() if steps > before[one]} == {width}
    assert [answer.output_ids for answer in got] == reference.output_ids
    tau = load.tau(got)
    assert tau <= width
    assert tau > 0.7 * width


def narrowed(server: TestedServer) -> dict[str, int]:
    found = server.server_info()["internal_states"][0]["dflash"]["narrowed"]
    assert found is not None
    return dict(found)


def test_random_bounds_change_no_answer(adaptive: TestedServer, reference: Reference) -> None:
    """The device leaves rows out of the experts, and accepts none of them."""
    # A last step is counted when the next request begins: here one of the same kind.
    first = reference._replace(prompts=reference.prompts[:1])
    answers(adaptive, first, [scripts.random_bound("first")], 1)
    before = narrowed(adaptive)
    rids = [scripts.random_bound(place) for place in range(len(reference.prompts))]
    got = answers(adaptive, reference, rids, 1)
    after = narrowed(adaptive)
    assert [answer.output_ids for answer in got] == reference.output_ids
    steps, drafted, verified = (after[key] - before[key] for key in after)
    assert steps > 300
    assert drafted == 16 * steps
    # Bounds of 1 to 16, each as likely: 300 have a mean of 8.5 with a standard error of 0.27.
    assert 7 < verified / steps < 10


@pytest.mark.parametrize("bound", [1, 3, 16])
def test_a_forced_bound(adaptive: TestedServer, reference: Reference, bound: int) -> None:
    first, some = (reference._replace(prompts=reference.prompts[:count]) for count in (1, 12))
    answers(adaptive, first, [scripts.forced_bound(bound, "first")], 1)
    before = narrowed(adaptive)
    got = answers(adaptive, some, [scripts.forced_bound(bound, n) for n in range(12)], 1)
    after = narrowed(adaptive)
    assert after["verified"] - before["verified"] == bound * (after["steps"] - before["steps"])
    assert [answer.output_ids for answer in got] == reference.output_ids[:12]
    tau = load.tau(got)
    assert tau <= bound
    assert tau > 0.7 * min(bound, 6)


def test_the_policy_changes_no_answer(adaptive: TestedServer, reference: Reference) -> None:
    for concurrency in (1, 8, 32):
        done = load.run(adaptive, reference.prompts, concurrency, MAX_NEW_TOKENS)
        adaptive.check_idle()
        assert [answer.output_ids for answer in done.answers] == reference.output_ids
        assert load.tau(done.answers) > 2
    assert adaptive.server_info()["internal_states"][0]["dflash"]["width"] == "adaptive"


@pytest.mark.parametrize(
    ("args", "batches"),
    [
        (("--max-running-requests", "1"), [1]),
        # Tokens of three requests; it is states, not tokens, that limit how many run.
        (("--max-total-tokens", "600"), [1, 4, 16, 32]),
    ],
    ids=["one request", "three requests"],
)
def test_pools_for_a_few_requests(
    args: tuple[str, ...], batches: list[int], reference: Reference, tmp_path: Path
) -> None:
    """Nothing is measured at a batch, or behind a context, that the pools do not hold."""
    pair = zoo.path("moe")
    with TestedServer(pair.verifier, pair.drafter, args=args, log_dir=tmp_path) as server:
        assert measured_batches(server) == batches
        done = load.run(server, reference.prompts, 8, MAX_NEW_TOKENS)
        assert [answer.output_ids for answer in done.answers] == reference.output_ids
        server.check_idle()


def with_options(prompt: str, **options: object) -> dict[str, Any]:
    return greedy(prompt, MAX_NEW_TOKENS, custom_params={"dflash": options})


def test_a_request_may_limit_itself(dflash: TestedServer, reference: Reference) -> None:
    prompts = reference.prompts[:12]
    cases: dict[str, dict[str, Any]] = {
        "free": {},
        "four": {"max_width": 4},
        "one": {"max_width": 1},
        "none": {"speculative": False},
    }
    payloads = [with_options(prompt, **options) for prompt in prompts for options in cases.values()]
    got = send_all(dflash, payloads, concurrency=12)
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
    "options",
    [{"max_width": 0}, {"max_width": "wide"}, {"speculative": 1}, {"width": 4}],
    ids=str,
)
def test_a_bad_option_is_refused(
    dflash: TestedServer, reference: Reference, options: dict[str, Any]
) -> None:
    prompt = reference.prompts[0]
    bad, good = send_all(
        dflash, [with_options(prompt, **options), with_options(prompt)], concurrency=2
    )
    status, body = bad
    assert status == 400
    assert "custom_params['dflash']" in body
    assert essence(good)["output_ids"] == list(reference.answers[0].output_ids)
