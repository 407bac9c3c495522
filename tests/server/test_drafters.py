"""Drafts of every quality, scripted: the worker commits what is right and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import pytest

from bench.harness import checkpoints, scripts
from bench.harness.configurations import Configuration
from bench.harness.requests import greedy, send_all
from bench.harness.servers import NotIdleError, TestedServer, settings
from dflash_sglang import zoo
from launch import load
from launch.client import Answer
from tests.support.reference import MAX_NEW_TOKENS, Reference, token_ids

BLOCK = 16
# Blocks as long as a page: every step crosses a page's end, at every place of the block.
CONFIGURATION = Configuration(BLOCK, 16)
# Positions of the drafter: more than the reference's prompts and answers have.
RANGE = 512


@pytest.fixture(scope="module")
def scripted_server(
    continuations: tuple[scripts.Continuation, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TestedServer]:
    folder = tmp_path_factory.mktemp("scripted")
    server = TestedServer(
        zoo.path("moe").verifier,
        checkpoints.short_drafter(folder / "short", RANGE),
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
    scripted_server.check_idle()


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
    return [Answer.parse(answer) for answer in send_all(server, payloads)]


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
    plain: TestedServer, scripted: TestedServer, reference: Reference
) -> None:
    ids = token_ids("".join(prompt.text + prompt.answer for prompt in zoo.prompts("moe")["sql"]))
    # Around the last position at which a block still fits, and well before it.
    lens = [*range(RANGE - 7 * BLOCK, RANGE + BLOCK, 6), RANGE - BLOCK, RANGE - BLOCK + 1]
    assert len(ids) > max(lens)
    payloads = [greedy(ids[:length], MAX_NEW_TOKENS, ignore_eos=True) for length in lens]
    expected = [Answer.parse(answer) for answer in send_all(plain, payloads)]
    short = [greedy(prompt, MAX_NEW_TOKENS) for prompt in reference.prompts]
    got = [Answer.parse(answer) for answer in send_all(scripted, [*payloads, *short])]
    assert [a.output_ids for a in got] == [a.output_ids for a in (*expected, *reference.answers)]
    # What starts past the range never speculates; what starts before it does.
    past = [a for a, n in zip(got, lens, strict=False) if n + BLOCK > RANGE]
    assert past
    assert all(answer.verify_count == answer.completion_tokens - 1 for answer in past)
    crossing = [a for a, n in zip(got, lens, strict=False) if n + BLOCK < RANGE]
    assert load.tau(crossing) > 1
    assert load.tau(got[len(lens) :]) > 1.5


def test_a_lost_slot_is_noticed(
    scripted_server: TestedServer, continuations: tuple[scripts.Continuation, ...]
) -> None:
    """The negative control of every `check_idle`; last, as the server does not survive it."""
    payload = {**greedy(continuations[0].prompt_ids, 8), "rid": scripts.LEAK}
    with contextlib.suppress(OSError):  # the server may die while it answers
        send_all(scripted_server, [payload])
    with pytest.raises(NotIdleError):
        scripted_server.check_idle()
    assert any("leak" in line.lower() for line in scripted_server.complaints())
