"""A request that ends inside a block ends where plain decoding ends it, with no slot left.

Stop expressions, ignored ends of text and several samples are features: see test_features.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bench.harness.requests import essence, greedy, send, send_all
from bench.harness.servers import TestedServer
from dflash_sglang import zoo
from tests.support.reference import Reference, token_ids

CONTEXT_LENGTH = 2048  # the embedded verifier's
BLOCK = 16
# SGLang hands the text of an unstreamed answer on in pieces, whenever the length is a multiple of
# 50 tokens (SGLANG_FORCE_STREAM_INTERVAL), and cannot take back the head of a stop string that was
# in an earlier piece: with the plain server too, trimmed text is only defined below this length.
FIRST_PIECE = 50

Compare = Callable[[list[dict[str, Any]]], list[Any]]


@pytest.fixture
def compare(plain: TestedServer, dflash: TestedServer) -> Compare:
    """Sends requests to both servers, asserts that they agree and returns the DFLASH answers."""

    def both(payloads: list[dict[str, Any]]) -> list[Any]:
        expected, got = send_all(plain, payloads), send_all(dflash, payloads)
        for payload, left, right in zip(payloads, expected, got, strict=True):
            assert essence(left) == essence(right), payload
        return got

    return both


def test_any_number_of_new_tokens(compare: Compare, reference: Reference) -> None:
    # 0 to two blocks and one: the last block is cut at every place.
    numbers = range(2 * BLOCK + 2)
    payloads = [
        greedy(prompt, number, ignore_eos=True)
        for prompt in reference.prompts[:2]
        for number in numbers
    ]
    got = compare(payloads)
    assert [len(answer["output_ids"]) for answer in got] == [*numbers, *numbers]


def test_a_stop_token_at_any_place_of_a_block(compare: Compare, reference: Reference) -> None:
    # The answer with the most different tokens: each is the stop token of one request.
    prompt, answer = max(
        zip(reference.prompts, reference.answers, strict=True),
        key=lambda pair: len(set(pair[1].output_ids)),
    )
    assert len(set(answer.output_ids)) > BLOCK
    got = compare(
        [greedy(prompt, stop_token_ids=[token]) for token in sorted(set(answer.output_ids))]
    )
    ends = {len(one["output_ids"]) for one in got}
    assert len({end % BLOCK for end in ends}) > BLOCK / 2
    assert all(one["meta_info"]["finish_reason"]["type"] == "stop" for one in got)


@pytest.mark.parametrize("trim", [True, False])
def test_a_stop_string_at_any_place(compare: Compare, reference: Reference, trim: bool) -> None:
    # Strings that start inside a token, end inside one, and span several.
    payloads = [
        greedy(
            prompt, FIRST_PIECE - 1, stop=[answer.text[start : start + 5]], no_stop_trim=not trim
        )
        for prompt, answer in zip(reference.prompts[:6], reference.answers[:6], strict=True)
        for start in range(3, min(100, len(answer.text) - 5), 9)
    ]
    got = compare(payloads)
    found = [
        one["text"].count(payload["sampling_params"]["stop"][0])
        for payload, one in zip(payloads, got, strict=True)
        if one["meta_info"]["finish_reason"].get("matched") == payload["sampling_params"]["stop"][0]
    ]
    assert len(found) > 0.7 * len(got)  # the others lie past the first piece
    assert set(found) == {0 if trim else 1}


@pytest.mark.parametrize("room", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK])
def test_the_end_of_the_context(compare: Compare, room: int) -> None:
    # A block drafted past the last position must stay inside the request's row of slots: three
    # at once, so that what spills over lands in a neighbour's row.
    text = "".join(prompt.text + prompt.answer for prompt in zoo.prompts("moe")["add"])
    ids = long_prompt(text)
    payloads = [
        greedy(ids[start : start + CONTEXT_LENGTH - room], room, ignore_eos=True)
        for start in range(3)
    ]
    got = compare(payloads)
    if room > 2 * BLOCK:
        assert all(one["meta_info"]["completion_tokens"] >= BLOCK for one in got)


def long_prompt(text: str) -> list[int]:
    ids = token_ids(text)
    assert len(ids) > CONTEXT_LENGTH
    return ids


def test_open_ended_requests_fill_the_context(plain: TestedServer, dflash: TestedServer) -> None:
    text = "".join(prompt.text + prompt.answer for prompt in zoo.prompts("moe")["sql"])
    payload = greedy(long_prompt(text)[: CONTEXT_LENGTH - 70], None, ignore_eos=True)
    left, right = send(plain, payload), send(dflash, payload)
    assert essence(left) == essence(right)
    assert right["meta_info"]["completion_tokens"] > 3 * BLOCK
