"""Recurrent layers under speculation: every answer is plain decoding's, every state released.

Wrong rollback shows as a wrong token somewhere behind it; a wrong state in the prefix cache, in the
turn that starts from it. The states themselves are compared in test_states.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bench.harness import scripts
from bench.harness.hybrids import (
    CONFIG,
    MAX_NEW_TOKENS,
    TURNS,
    answer_of,
    converse,
    endless,
    hybrid_pair,
    send_turn,
)
from bench.harness.requests import events, send, send_all
from bench.harness.servers import ANY_NUMBER, TestedServer, measured_batches, settings
from dflash_sglang import zoo
from launch import devices
from launch.devices import Device

BLOCK = 16
# Every answer crosses a boundary at which a state is kept for the prefix cache, most several.
INTERVAL = 64
TRACKING = ("--mamba-track-interval", str(INTERVAL))
LONG = 600


class Talk(NamedTuple):
    """Plain decoding's answers, and what it found in its prefix cache."""

    pair: zoo.Pair
    turns: list[list[scripts.Continuation]]
    long: scripts.Continuation
    cached: list[list[int]]  # by turn, the last one again the first: tokens found in the cache


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> Talk:
    folder = tmp_path_factory.mktemp("hybrid")
    pair = hybrid_pair(folder)
    with TestedServer(pair.verifier, args=TRACKING, log_dir=folder / "plain") as plain:
        turns = converse(plain)
        prompt = turns[0][3].prompt_ids
        answer = send(plain, endless(prompt, LONG + scripts.SPARE_TOKENS))
        plain.flush()
        names = [f"plain-{place}" for place in range(len(turns[0]))]
        answers = [send_turn(plain, turn, names) for turn in (*turns, turns[0])]
        for turn, answered in zip((*turns, turns[0]), answers, strict=True):
            assert_answers(turn, answered)  # else a difference below would prove nothing
        plain.check_idle()
    return Talk(
        pair,
        turns,
        scripts.Continuation(prompt, tuple(answer["output_ids"])),
        [cached_tokens(answered) for answered in answers],
    )


def serve(
    talk: Talk,
    folder: Path,
    *args: str,
    plugins: Sequence[str] = (),
    variables: Mapping[str, str] = {},
    device: Device = devices.CPU,
    **given: Any,
) -> TestedServer:
    """A server whose drafts are scripted, with settings as given."""
    answered = [one for turn in talk.turns for one in turn]
    longest = {one.prompt_ids: one for one in (*answered, talk.long)}
    env = scripts.environment(folder / "plugin", longest.values(), *plugins)
    return TestedServer(
        talk.pair.verifier,
        talk.pair.drafter,
        args=[*TRACKING, *args, *settings(folder / "settings.json", **given)],
        env={**env, **variables},
        log_dir=folder,
        device=device,
    )


def cached_tokens(answers: Sequence[Any]) -> list[int]:
    return [answer["meta_info"]["cached_tokens"] for answer in answers]


def assert_answers(turn: Sequence[scripts.Continuation], answers: Sequence[Any]) -> None:
    assert [tuple(answer["output_ids"]) for answer in answers] == [answer_of(one) for one in turn]


def mixed_scripts(turn: Sequence[scripts.Continuation], name: str) -> list[str]:
    """Drafts of every quality side by side."""
    return [
        scripts.holes(place, f"{name}.{place}")
        if place % 4 == 3
        else scripts.oracle((5 * place + len(name)) % BLOCK, f"{name}.{place}")
        for place in range(len(turn))
    ]


def assert_chats(
    server: TestedServer, talk: Talk, name: str, random_widths: bool = False
) -> list[list[int]]:
    """All turns and the first one again; returns what was found in the cache."""
    server.flush()
    found = []
    for number, turn in enumerate((*talk.turns, talk.turns[0])):
        rids = mixed_scripts(turn, f"{name}{number}")
        if random_widths:
            rids = [scripts.random_width(rid) for rid in rids]
        answers = send_turn(server, turn, rids)
        assert_answers(turn, answers)
        found.append(cached_tokens(answers))
    server.check_idle()
    return found


def assert_any_bound(server: TestedServer, talk: Talk) -> None:
    """Of single requests another number of tokens is verified each step, and states follow."""
    server.flush()
    for number, turn in enumerate(talk.turns[:2]):
        rids = [scripts.random_bound(rid) for rid in mixed_scripts(turn, f"bound{number}")]
        assert_answers(turn, send_turn(server, turn, rids, concurrency=1))
    narrowed = server.server_info()["internal_states"][0]["dflash"]["narrowed"]
    assert 0 < narrowed["verified"] < 0.8 * narrowed["drafted"]
    server.check_idle()


def assert_no_fewer(found: Sequence[Sequence[int]], plain: Sequence[Sequence[int]]) -> None:
    """Tokens in the cache: no conversation finds fewer in any turn than with plain decoding."""
    fewer = [
        (turn, place, ours, plains)
        for turn, counts in enumerate(zip(found, plain, strict=True))
        for place, (ours, plains) in enumerate(zip(*counts, strict=True))
        if ours < plains
    ]
    assert fewer == []


@pytest.fixture(scope="module")
def server(talk: Talk, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestedServer]:
    """Overlap, pages of a token, whole blocks, replay."""
    with serve(talk, tmp_path_factory.mktemp("main"), width="fixed") as running:
        yield running


@pytest.mark.parametrize("concurrency", [1, 8])
def test_every_accepted_length(server: TestedServer, talk: Talk, concurrency: int) -> None:
    turn = talk.turns[0]
    for shift in range(0, BLOCK, len(turn)):
        right = [(place + shift) % BLOCK for place in range(len(turn))]
        names = [scripts.oracle(k, f"{concurrency}.{shift}.{i}") for i, k in enumerate(right)]
        answers = send_turn(server, turn, names, concurrency)
        assert_answers(turn, answers)
        for k, answer in zip(right, answers, strict=True):
            verifies = answer["meta_info"]["spec_verify_ct"]
            assert verifies == -(-(MAX_NEW_TOKENS - 1) // (k + 1))
    server.check_idle()


def test_wrong_and_random_drafts(server: TestedServer, talk: Talk) -> None:
    turn = talk.turns[0]
    for name in (scripts.wrong, lambda place: f"unscripted-{place}"):
        names = [name(place) for place in range(len(turn))]
        assert_answers(turn, send_turn(server, turn, names))
    server.check_idle()


def test_chats_start_from_states_that_decoding_left(server: TestedServer, talk: Talk) -> None:
    found = assert_chats(server, talk, "chat")
    assert_no_fewer(found, talk.cached)
    # Past the prompt: states that a verify has committed and kept aside.
    prompts = [len(turn.prompt_ids) for turn in talk.turns[0]]
    assert any(tokens > length for tokens, length in zip(found[1], prompts, strict=True))


def test_a_long_answer_crosses_many_boundaries(server: TestedServer, talk: Talk) -> None:
    server.flush()
    payloads = [
        {**endless(talk.long.prompt_ids, LONG), "rid": scripts.oracle(k, f"long-{k}")}
        for k in (BLOCK - 1, 6)
    ]
    for answer in send_all(server, payloads):
        assert tuple(answer["output_ids"]) == talk.long.output_ids[:LONG]
    server.check_idle()


def test_an_end_before_a_boundary_inside_a_run(server: TestedServer, talk: Talk) -> None:
    """The verify has committed past the end and kept the state of a boundary behind it.

    The next turn starts from what is in the cache of the request that ended.
    """
    server.flush()
    ends, payloads = [], []
    for place, one in enumerate(talk.turns[0]):
        boundary = -(-len(one.prompt_ids) // INTERVAL) * INTERVAL - len(one.prompt_ids)
        # A few tokens before it; it may occur earlier, and so may the end of text.
        stop = one.output_ids[max(boundary - 4, 0)]
        stops = {stop, CONFIG["eos_token_id"]}
        ends.append(1 + next(i for i, token in enumerate(one.output_ids) if token in stops))
        payload = endless(one.prompt_ids, MAX_NEW_TOKENS)
        payload["sampling_params"] |= {"ignore_eos": False, "stop_token_ids": [stop]}
        payloads.append({**payload, "rid": scripts.oracle(BLOCK - 1, f"end.{place}")})
    answers = send_all(server, payloads)
    for one, end, answer in zip(talk.turns[0], ends, answers, strict=True):
        assert tuple(answer["output_ids"]) == one.output_ids[:end]
    rests = [
        endless((*one.prompt_ids, *one.output_ids[:end]), 24)
        for one, end in zip(talk.turns[0], ends, strict=True)
    ]
    for one, end, answer in zip(talk.turns[0], ends, send_all(server, rests), strict=True):
        assert tuple(answer["output_ids"]) == one.output_ids[end : end + 24]
    server.check_idle()


def test_aborted_requests_leave_no_state(server: TestedServer, talk: Talk) -> None:
    turn = talk.turns[0]
    for place in range(3):
        payload = {**endless(turn[place].prompt_ids, 1500), "stream": True}
        response = server.open("/generate", {**payload, "rid": f"abort-{place}"})
        next(events(response))
        time.sleep(0.02 * place)
        server.open("/abort_request", {"rid": f"abort-{place}"}).close()
        response.close()
    assert_answers(turn, send_turn(server, turn, mixed_scripts(turn, "after")))
    server.check_idle()


def test_any_width_in_runs_of_plain_tokens(talk: Talk, tmp_path: Path) -> None:
    """No overlap, pages; a random width each step, runs of plain tokens at width 1."""
    args = ("--disable-overlap-schedule", "--page-size", "16")
    with serve(talk, tmp_path, *args, plugins=("scripted_widths",)) as server:
        found = assert_chats(server, talk, "widths", random_widths=True)
        assert_any_bound(server, talk)
        steps = server.server_info()["internal_states"][0]["dflash"]["steps_by_width"]
    assert all(steps[str(width)] for width in (1, 4, 16))
    # A run ends where a state is to be kept: else the scheduler would not know that it was.
    assert_no_fewer(found, talk.cached)


def test_snapshots_with_slots_on_demand(talk: Talk, tmp_path: Path) -> None:
    """SGLang's own rollback, random widths, chunks in mixed batches, requests that start over."""
    strategy = ("--mamba-radix-cache-strategy", "extra_buffer_lazy")
    pool = ("--max-mamba-cache-size", "64")
    args = (*strategy, *pool, "--enable-mixed-chunk", "--chunked-prefill-size", "64")
    plugins = ("scripted_widths",)
    env = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}
    with serve(
        talk, tmp_path, *args, plugins=plugins, variables=env, rollback="snapshot"
    ) as server:
        assert_chats(server, talk, "snapshot", random_widths=True)
        assert_any_bound(server, talk)
        state = server.server_info()["internal_states"][0]["dflash"]
    assert state["rollback"] == "snapshot"
    assert max(server.log_values("#retracted_reqs")) > 0


def test_replay_that_the_division_of_memory_chose(talk: Talk, tmp_path: Path) -> None:
    """As on a GPU without room for snapshots: chosen after the flags, before the pools."""
    with serve(talk, tmp_path, plugins=("scripted_widths", "little_memory")) as server:
        found = assert_chats(server, talk, "memory", random_widths=True)
        state = server.server_info()["internal_states"][0]["dflash"]
    assert_no_fewer(found, talk.cached)
    assert state["rollback"] == "replay"
    log = server.log_path.read_text()
    assert "back by replay: with snapshots 0 of the 32 running requests asked for" in log


def test_states_for_fewer_requests_than_sglang_asks_for(talk: Talk, tmp_path: Path) -> None:
    """Nothing is measured at a batch that the pool of states does not hold."""
    pool = ("--max-mamba-cache-size", "20")
    with serve(talk, tmp_path, *pool, device=ANY_NUMBER) as server:
        assert measured_batches(server) == [1, 4]
        assert_chats(server, talk, "few")


def test_without_buffers_the_state_of_an_end_is_handed_on(talk: Talk, tmp_path: Path) -> None:
    """An answer ends inside what its last verify accepts; a later turn finds all of it."""
    args = ("--disable-overlap-schedule", "--mamba-radix-cache-strategy", "no_buffer")
    with serve(talk, tmp_path, *args, width="fixed") as server:
        found = assert_chats(server, talk, "ends")
    for turn, counts in zip(talk.turns, found[1:TURNS], strict=False):
        # The last token of an answer has not been through the model.
        assert counts == [len(one.prompt_ids) + MAX_NEW_TOKENS - 1 for one in turn]
