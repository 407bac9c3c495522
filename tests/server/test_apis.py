"""Every route and form of a request, answered as by plain decoding.

What the sampling parameters of these requests do is in test_features.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from bench.harness.requests import essence, greedy, openai_essence, send, send_all, stream
from bench.harness.servers import TestedServer
from dflash_sglang import zoo
from tests.support.reference import Reference


def chat(question: str, **options: object) -> dict[str, Any]:
    return {
        "model": "default",
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 80,
        "separate_reasoning": False,  # only the plain server would
        **options,
    }


def completion(prompt: object, **options: object) -> dict[str, Any]:
    return {"model": "default", "prompt": prompt, "temperature": 0, "max_tokens": 80, **options}


@pytest.fixture(scope="module")
def questions() -> list[str]:
    return [prompts[0].question for prompts in zoo.prompts("moe").values() if prompts]


# ---- /generate ---------------------------------------------------------------------------------


def test_generate_takes_a_batch(dflash: TestedServer, reference: Reference) -> None:
    got = send(dflash, {**greedy(""), "text": reference.prompts[:8]})
    assert [tuple(one["output_ids"]) for one in got] == [
        answer.output_ids for answer in reference.answers[:8]
    ]


def test_generate_takes_token_ids(plain: TestedServer, dflash: TestedServer) -> None:
    # Not the tokens of any text: 1 to 40 ids out of order.
    payloads = [
        greedy([(7 * place) % 900 + 20 for place in range(length)]) for length in range(1, 41, 3)
    ]
    assert essence(send_all(dflash, payloads)) == essence(send_all(plain, payloads))


def test_a_generate_stream_grows_to_the_answer(dflash: TestedServer, reference: Reference) -> None:
    for prompt, answer in zip(reference.prompts[:8], reference.answers, strict=False):
        events = stream(dflash, greedy(prompt))
        # Every event has the answer so far: nothing that was sent is taken back.
        ids = [tuple(event["output_ids"]) for event in events]
        texts = [event["text"] for event in events]
        assert (ids[-1], texts[-1]) == (answer.output_ids, answer.text)
        assert all(late[: len(early)] == early for early, late in itertools.pairwise(ids))
        assert all(late.startswith(early) for early, late in itertools.pairwise(texts))
        assert len(events) > 2


# ---- the OpenAI routes -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"n": 2}, {"ignore_eos": True, "max_tokens": 37}],
    ids=str,
)
def test_completions(
    plain: TestedServer, dflash: TestedServer, reference: Reference, options: dict[str, Any]
) -> None:
    prompts: list[object] = [*reference.prompts[:4], reference.prompts[4:7], [40, 50, 60, 70]]
    payloads = [completion(prompt, **options) for prompt in prompts]
    expected = send_all(plain, payloads, path="/v1/completions")
    got = send_all(dflash, payloads, path="/v1/completions")
    assert [openai_essence(one) for one in got] == [openai_essence(one) for one in expected]
    assert all(len(one["choices"]) == options.get("n", 1) for one in got[:4])


@pytest.mark.parametrize("options", [{}, {"n": 2}, {"stop": ["\n"]}], ids=str)
def test_chat_completions(
    plain: TestedServer, dflash: TestedServer, questions: list[str], options: dict[str, Any]
) -> None:
    payloads = [chat(question, **options) for question in questions]
    path = "/v1/chat/completions"
    expected, got = send_all(plain, payloads, path=path), send_all(dflash, payloads, path=path)
    assert [openai_essence(one) for one in got] == [openai_essence(one) for one in expected]
    assert all(choice["message"]["content"] for one in got for choice in one["choices"])


def test_a_completions_stream_joins_to_the_answer(
    dflash: TestedServer, reference: Reference
) -> None:
    path = "/v1/completions"
    for prompt in reference.prompts[:6]:
        whole = send(dflash, completion(prompt), path)
        options = {"stream_options": {"include_usage": True}}
        events = stream(dflash, completion(prompt, **options), path)
        texts = [choice["text"] for event in events for choice in event["choices"]]
        assert "".join(texts) == whole["choices"][0]["text"]
        reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
        assert list(filter(None, reasons)) == [whole["choices"][0]["finish_reason"]]
        usage = events[-1]["usage"]
        assert usage["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_a_chat_stream_joins_to_the_answer(dflash: TestedServer, questions: list[str]) -> None:
    path = "/v1/chat/completions"
    for question in questions:
        whole = send(dflash, chat(question), path)["choices"][0]
        deltas = [
            choice["delta"]
            for event in stream(dflash, chat(question), path)
            for choice in event["choices"]
        ]
        joined = "".join(delta.get("content") or "" for delta in deltas)
        assert joined == whole["message"]["content"]
