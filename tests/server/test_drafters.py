"""Drafts of every quality, scripted: the worker commits what is right and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from bench.harness import checkpoints, scripts
from bench.harness.configurations import Configuration
from bench.harness.requests import ask_all, greedy
from bench.harness.servers import NotAtRestError, TestedServer, settings
from dflash_sglang import zoo
from launch import load
from launch.client import Answer
from tests.server.conftest import MAX_NEW_TOKENS, Reference

BLOCK = 16
# Blocks as long as a page: every step crosses a page's end, at every place of the block.
CONFIGURATION = Configuration(BLOCK, 16)


@pytest.fixture(scope="module")
def continuations(
    plain_server: TestedServer, reference: Reference
) -> tuple[scripts.Continuation, ...]:
    return scripts.continuations(plain_server, reference.prompts, MAX_NEW_TOKENS)


@pytest.fixture(scope="module")
def scripted_server(
    continuations: tuple[scripts.Continuation, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TestedServer]:
    folder = tmp_path_factory.mktemp("scripted")
    server = TestedServer(
        zoo.path("moe").verifier,
        CONFIGURATION.checkpoint(folder),
        # What a verify accepts is counted: every step must show the whole block.
        args=[*CONFIGURATION.args(), *settings(folder / "settings.json", width="fixed")],
        env=scripts.environment(folder / "plugin", continuations),
        log_dir=folder,
    )
    try:
        server.start()
        server.wait_ready()
        yield server
    finally:
        server.stop()


@pytest.fixture
def scripted(scripted_server: TestedServer) -> Iterator[TestedServer]:
    yield scripted_server
    scripted_server.check_rest()


def answers(
    server: TestedServer,
    continuations: Sequence[scripts.Continuation],
    rids: Sequence[str],
    **sampling: object,
) -> list[Answer]:
    payloads = [
        {**greedy(continuation.prompt_ids, MAX_NEW_TOKENS, **sampling), "rid": rid}
        for continuation, rid in zip(continuations, rids, strict=True)
    ]
    return [Answer.parse(answer) for answer in ask_all(server, payloads)]


def plain_ids(reference: Reference) -> list[tuple[int, ...]]:
    return [answer.output_ids for answer in reference.answers]


@pytest.mark.parametrize("shift", range(4))
def test_an_oracle_right_for_k_drafts_commits_k_and_one(
    scripted: TestedServer,
    continuations: tuple[scripts.Continuation, ...],
    reference: Reference,
    shift: int,
) -> None:
    # Neighbours in a batch differ in k, so their lengths grow apart; 40 prompts times 4 shifts
    # make ten of each k.
    right = [(place + 4 * shift) % BLOCK for place in range(len(continuations))]
    rids = [scripts.oracle(k, f"{shift}.{place}") for place, k in enumerate(right)]
    got = answers(scripted, continuations, rids)
    assert [answer.output_ids for answer in got] == plain_ids(reference)
    for k, answer in zip(right, got, strict=True):
        # Every verify accepted exactly k: neither one draft too few nor the right ones behind.
        assert scripts.correct_drafts(answer) == [0] * k + [answer.verify_count]
        assert answer.verify_count == -(-(answer.completion_tokens - 1) // (k + 1))


def test_an_end_of_text_inside_an_accepted_block_ends_the_answer(
    scripted: TestedServer,
    continuations: tuple[scripts.Continuation, ...],
    reference: Reference,
) -> None:
    ended = [
        place
        for place, answer in enumerate(reference.answers)
        if answer.meta["finish_reason"]["type"] == "stop"
        and (len(answer.output_ids) - 1) % BLOCK  # else it is the last token of a block
    ]
    assert len(ended) > len(continuations) / 2
    rids = [scripts.oracle(BLOCK - 1, f"end.{place}") for place in ended]
    got = answers(scripted, [continuations[place] for place in ended], rids)
    # What the whole last block committed is longer than the answer.
    assert all(
        answer.verify_count * BLOCK + 1 > len(reference.answers[place].output_ids)
        for place, answer in zip(ended, got, strict=True)
    )
    assert [answer.output_ids for answer in got] == [plain_ids(reference)[place] for place in ended]


def test_ignoring_end_of_text_goes_on_behind_it(
    scripted: TestedServer, continuations: tuple[scripts.Continuation, ...]
) -> None:
    rids = [scripts.oracle(BLOCK - 1, f"ignore.{place}") for place in range(len(continuations))]
    got = answers(scripted, continuations, rids, ignore_eos=True)
    assert [answer.output_ids for answer in got] == [
        continuation.output_ids[:MAX_NEW_TOKENS] for continuation in continuations
    ]


@pytest.mark.parametrize("script", ["wrong", "holes"])
def test_adversarial_drafts_change_no_answer(
    scripted: TestedServer,
    continuations: tuple[scripts.Continuation, ...],
    reference: Reference,
    script: str,
) -> None:
    places = range(len(continuations))
    rids = [
        scripts.wrong(place) if script == "wrong" else scripts.holes(place, place)
        for place in places
    ]
    got = answers(scripted, continuations, rids)
    assert [answer.output_ids for answer in got] == plain_ids(reference)
    if script == "wrong":
        assert all(scripts.correct_drafts(answer) == [answer.verify_count] for answer in got)
    else:
        # Holes at a quarter of the places: runs of three on average, never the whole block.
        assert sum(map(sum_correct, got)) > sum(answer.verify_count for answer in got)


def sum_correct(answer: Answer) -> int:
    return sum(k * steps for k, steps in enumerate(scripts.correct_drafts(answer)))


def test_past_the_drafters_range_answers_go_on_a_token_a_step(
    reference: Reference, tmp_path: Path
) -> None:
    prompt_lens = [answer.meta["prompt_tokens"] for answer in reference.answers]
    positions = sorted(prompt_lens)[len(prompt_lens) // 2] + 2 * BLOCK
    drafter = checkpoints.short_drafter(tmp_path / "short", positions)
    # The policy would stop drafting for all: most of these requests are held to a token.
    args = settings(tmp_path / "settings.json", width="fixed")
    with TestedServer(
        zoo.path("moe").verifier, drafter, args=args, log_dir=tmp_path / "log"
    ) as server:
        done = load.run(server, reference.prompts, 8, MAX_NEW_TOKENS)
        server.check_rest()
    assert [answer.output_ids for answer in done.answers] == plain_ids(reference)
    # What starts past the range never speculates; what starts well before it does.
    past = [a for a, n in zip(done.answers, prompt_lens, strict=True) if n + BLOCK > positions]
    before = [a for a, n in zip(done.answers, prompt_lens, strict=True) if n + BLOCK < positions]
    assert past
    assert all(answer.verify_count == answer.completion_tokens - 1 for answer in past)
    assert load.tau(before) > 1.5


def test_a_lost_slot_is_noticed(
    scripted_server: TestedServer, continuations: tuple[scripts.Continuation, ...]
) -> None:
    """The negative control of every `check_rest`; last, as the server does not survive it."""
    payload = {**greedy(continuations[0].prompt_ids, 8), "rid": scripts.LEAK}
    with contextlib.suppress(OSError):  # the server may die while it answers
        ask_all(scripted_server, [payload])
    with pytest.raises(NotAtRestError):
        scripted_server.check_rest()
    assert any("leak" in line.lower() for line in scripted_server.complaints())
