"""Greedy answers equal plain decoding's, token for token, whatever the way to serve."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from bench.harness.configurations import CHUNK, Configuration, Drafter, Retraction
from bench.harness.requests import essence, greedy, send_all
from bench.harness.scripts import correct_drafts
from bench.harness.servers import TestedServer, serve
from dflash_sglang import zoo
from launch import load
from launch.client import Answer
from tests.support.reference import MAX_NEW_TOKENS, Reference

# Every value of every axis, the pairs that share code together: windows, pages and chunks; mixed
# batches and retraction. All pairs are in bench/exactness/identity.py.
SAMPLE = (
    Configuration(4, 16, overlap=False, radix=False, chunked=True, window=True),
    Configuration(8, 1, Drafter.SLIDING, chunked=True, mixed=True, retraction=Retraction.FORCED),
    Configuration(16, 16, Drafter.RANDOM, overlap=False, retraction=Retraction.PRESSURE),
)


def assert_same(expected: Sequence[Answer], got: Sequence[Answer]) -> None:
    difference = load.first_difference(expected, got)
    assert difference is None, difference


def assert_drafts_add_up(answer: Answer, configuration: Configuration) -> None:
    """Every verify counts once, with what it accepted; only the last one reaches past the end."""
    block_size = configuration.block_size
    counts = correct_drafts(answer)
    assert sum(counts) == answer.verify_count
    assert not any(counts[block_size:])
    committed = 1 + sum(steps * (k + 1) for k, steps in enumerate(counts))
    assert committed < answer.completion_tokens + block_size
    # A prefill commits a token without a verify: after a retraction, or of its mixed batch.
    if answer.meta["num_retractions"] == 0 and not configuration.mixed:
        assert answer.completion_tokens <= committed


def retractions(answers: Sequence[Answer]) -> int:
    return sum(answer.meta["num_retractions"] for answer in answers)


def test_plain_answers_do_not_depend_on_the_batch(
    plain: TestedServer, reference: Reference
) -> None:
    # Else a difference below would prove nothing.
    for concurrency in (1, 32):
        again = load.run(plain, reference.prompts[:16], concurrency, MAX_NEW_TOKENS)
        assert_same(reference.answers[:16], again.answers)


@pytest.mark.parametrize("concurrency", [1, 8, 32])
def test_answers_are_plain_decodings(
    dflash: TestedServer, reference: Reference, concurrency: int
) -> None:
    done = load.run(dflash, reference.prompts, concurrency, MAX_NEW_TOKENS)
    assert_same(reference.answers, done.answers)
    # A worker that accepts nothing is exact too: the embedded drafter must be of use, and of the
    # same use in a batch as alone (4.5 to 6.5 with the pairs so far).
    assert load.tau(done.answers) > 4.0


def test_a_prefix_hit_finds_the_draft_cache(dflash: TestedServer, reference: Reference) -> None:
    payloads = [greedy(prompt, MAX_NEW_TOKENS) for prompt in reference.prompts]
    dflash.flush()
    fresh = send_all(dflash, payloads)
    again = send_all(dflash, payloads)
    assert essence(again) == essence(fresh)
    assert all(
        answer["meta_info"]["cached_tokens"] >= answer["meta_info"]["prompt_tokens"] - 1
        for answer in again
    )
    # Draft keys missing behind a hit would leave answers right and drafts wrong.
    assert verifies(again) == pytest.approx(verifies(fresh), rel=0.02)


def test_a_second_turn_reuses_what_decoding_wrote(
    plain: TestedServer, dflash: TestedServer, reference: Reference
) -> None:
    question = zoo.prompts("moe")["add"][0].text
    turns = [
        greedy(f"{prompt}{answer.text}<|im_end|>\n{question}", MAX_NEW_TOKENS)
        for prompt, answer in zip(reference.prompts, reference.answers, strict=True)
    ]
    dflash.flush()
    fresh = send_all(dflash, turns)
    dflash.flush()
    send_all(dflash, [greedy(prompt, MAX_NEW_TOKENS) for prompt in reference.prompts])
    cached = send_all(dflash, turns)
    assert essence(cached) == essence(fresh) == essence(send_all(plain, turns))
    reused = [
        answer["meta_info"]["cached_tokens"] - first.meta["prompt_tokens"]
        for answer, first in zip(cached, reference.answers, strict=True)
    ]
    assert sum(tokens > 8 for tokens in reused) > len(reused) / 2  # reaches into the answer
    assert verifies(cached) == pytest.approx(verifies(fresh), rel=0.02)


def verifies(answers: Sequence[dict[str, Any]]) -> int:
    return sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)


@pytest.fixture(scope="module", params=SAMPLE, ids=lambda configuration: configuration.name)
def configured(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Configuration, TestedServer]]:
    configuration: Configuration = request.param
    folder = tmp_path_factory.mktemp("configured")
    with serve(configuration, folder) as server:
        yield configuration, server


def test_a_configuration_changes_no_answer(
    configured: tuple[Configuration, TestedServer], reference: Reference
) -> None:
    configuration, server = configured
    answers: list[Answer] = []
    for concurrency in (8, 32):
        done = load.run(server, reference.prompts, concurrency, MAX_NEW_TOKENS)
        server.check_idle()
        assert_same(reference.answers, done.answers)
        answers += done.answers
    # Each axis did what it is there for.
    if configuration.drafter is Drafter.RANDOM:
        assert load.tau(answers) < 1.2
    else:
        assert load.tau(answers) > 2.0
    if configuration.chunked:
        assert max(server.log_values("#new-token")) <= CHUNK
    if configuration.retraction is not Retraction.NONE:
        assert retractions(answers) > 0
    for answer in answers:
        assert_drafts_add_up(answer, configuration)
