"""Every way to ask, answered as by plain decoding."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from bench.harness.requests import ask, ask_all, essence, greedy, openai_essence, stream
from bench.harness.servers import TestedServer
from dflash_sglang import zoo
from tests.server.conftest import Reference

# float32 sums of the same terms in another order: a block goes through other matrix shapes than a
# single token. Seen: 2e-5.
LOGPROB_TOLERANCE = 2e-4

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
CONSTRAINTS = {
    "regex": {"regex": r"(Step [0-9]: [a-z ]{3,20}\n){2}Answer: [0-9]+"},
    "json_schema": {"json_schema": json.dumps(PERSON)},
    "ebnf": {"ebnf": 'root ::= item ("," item)*\nitem ::= [a-z]+ "=" [0-9]+'},
}


def chat(question: str, **options: object) -> dict[str, Any]:
    return {
        "model": "default",
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 80,
        **options,
    }


def completion(prompt: object, **options: object) -> dict[str, Any]:
    return {"model": "default", "prompt": prompt, "temperature": 0, "max_tokens": 80, **options}


@pytest.fixture(scope="module")
def questions() -> list[str]:
    return [prompts[0].question for prompts in zoo.prompts("moe").values() if prompts]


# ---- /generate ---------------------------------------------------------------------------------


def test_generate_takes_a_batch(dflash: TestedServer, reference: Reference) -> None:
    got = ask(dflash, {**greedy(""), "text": reference.prompts[:8]})
    assert [tuple(one["output_ids"]) for one in got] == [
        answer.output_ids for answer in reference.answers[:8]
    ]


def test_generate_takes_token_ids(plain: TestedServer, dflash: TestedServer) -> None:
    # Not the tokens of any text: 1 to 40 ids out of order.
    payloads = [
        greedy([(7 * place) % 900 + 20 for place in range(length)]) for length in range(1, 41, 3)
    ]
    assert essence(ask_all(dflash, payloads)) == essence(ask_all(plain, payloads))


def test_a_generate_stream_joins_to_the_answer(dflash: TestedServer, reference: Reference) -> None:
    for prompt, answer in zip(reference.prompts[:8], reference.answers, strict=False):
        events = stream(dflash, greedy(prompt))
        assert events[-1]["text"] == answer.text
        ids = [token for event in events for token in event["output_ids"]]
        assert (
            tuple(events[-1]["output_ids"]) == answer.output_ids or tuple(ids) == answer.output_ids
        )
        # Text only grows: nothing that was sent is taken back.
        texts = [event["text"] for event in events]
        assert all(late.startswith(early) for early, late in itertools.pairwise(texts))


@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_a_constrained_answer(
    plain: TestedServer, dflash: TestedServer, reference: Reference, constraint: str
) -> None:
    payloads = [greedy(prompt, **CONSTRAINTS[constraint]) for prompt in reference.prompts[:12]]
    # And free requests in the same batch, which no mask may touch.
    payloads += [greedy(prompt) for prompt in reference.prompts[12:16]]
    got = ask_all(dflash, payloads)
    assert essence(got) == essence(ask_all(plain, payloads))
    assert [tuple(one["output_ids"]) for one in got[12:]] == [
        answer.output_ids for answer in reference.answers[12:16]
    ]


def test_a_logit_bias(plain: TestedServer, dflash: TestedServer, reference: Reference) -> None:
    payloads = [
        greedy(prompt, logit_bias={str(token): bias})
        for prompt, answer in zip(reference.prompts[:8], reference.answers, strict=False)
        for token, bias in ((answer.output_ids[5], -100.0), (answer.output_ids[3], 6.0))
    ]
    got = ask_all(dflash, payloads)
    assert essence(got) == essence(ask_all(plain, payloads))
    assert all(
        int(token) not in one["output_ids"]
        for payload, one in zip(payloads, got, strict=True)
        for token, bias in payload["sampling_params"]["logit_bias"].items()
        if bias == -100.0
    )


def test_logprobs(plain: TestedServer, dflash: TestedServer, reference: Reference) -> None:
    payloads = [
        {
            **greedy(prompt),
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 3,
            "token_ids_logprob": [5, 9],
        }
        for prompt in reference.prompts[:12]
    ]
    for left, right in zip(ask_all(plain, payloads), ask_all(dflash, payloads), strict=True):
        for name in (
            "input_token_logprobs",
            "output_token_logprobs",
            "input_top_logprobs",
            "output_top_logprobs",
            "input_token_ids_logprobs",
            "output_token_ids_logprobs",
        ):
            expected, got = (
                list(flat(left["meta_info"][name])),
                list(flat(right["meta_info"][name])),
            )
            assert [token for _, token in expected] == [token for _, token in got], name
            assert [value for value, _ in got] == pytest.approx(
                [value for value, _ in expected], abs=LOGPROB_TOLERANCE
            ), name
        assert len(right["meta_info"]["output_token_logprobs"]) == len(right["output_ids"])


def flat(entries: Any) -> Iterator[tuple[float, int]]:
    """(log-probability, token id) of nested lists of `[log-probability, id, text]`."""
    if entries is None:
        return
    if len(entries) == 3 and not isinstance(entries[1], list):
        if entries[0] is not None:  # the first prompt token has none
            yield entries[0], entries[1]
        return
    for entry in entries:
        yield from flat(entry)


# ---- the OpenAI routes -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"n": 2}, {"echo": True}, {"stop": ["\n"]}, {"ignore_eos": True, "max_tokens": 37}],
    ids=str,
)
def test_completions(
    plain: TestedServer, dflash: TestedServer, reference: Reference, options: dict[str, Any]
) -> None:
    prompts: list[object] = [*reference.prompts[:4], reference.prompts[4:7], [40, 50, 60, 70]]
    payloads = [completion(prompt, **options) for prompt in prompts]
    expected = ask_all(plain, payloads, path="/v1/completions")
    got = ask_all(dflash, payloads, path="/v1/completions")
    assert [openai_essence(one) for one in got] == [openai_essence(one) for one in expected]
    assert all(len(one["choices"]) == options.get("n", 1) for one in got[:4])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n": 2},
        {"stop": ["\n"]},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "p", "schema": PERSON},
            }
        },
        {"logit_bias": {"20": -100}},
    ],
    ids=lambda options: next(iter(options), "defaults"),
)
def test_chat_completions(
    plain: TestedServer, dflash: TestedServer, questions: list[str], options: dict[str, Any]
) -> None:
    payloads = [chat(question, **options) for question in questions]
    path = "/v1/chat/completions"
    expected, got = ask_all(plain, payloads, path=path), ask_all(dflash, payloads, path=path)
    assert [openai_essence(one) for one in got] == [openai_essence(one) for one in expected]
    assert all(choice["message"]["content"] for one in got for choice in one["choices"])


def test_chat_logprobs(plain: TestedServer, dflash: TestedServer, questions: list[str]) -> None:
    payloads = [chat(question, logprobs=True, top_logprobs=2) for question in questions]
    path = "/v1/chat/completions"
    expected, got = ask_all(plain, payloads, path=path), ask_all(dflash, payloads, path=path)
    for left, right in zip(expected, got, strict=True):
        left_tokens = left["choices"][0]["logprobs"]["content"]
        right_tokens = right["choices"][0]["logprobs"]["content"]
        assert [one["token"] for one in right_tokens] == [one["token"] for one in left_tokens]
        assert [one["logprob"] for one in right_tokens] == pytest.approx(
            [one["logprob"] for one in left_tokens], abs=LOGPROB_TOLERANCE
        )


def test_a_completions_stream_joins_to_the_answer(
    dflash: TestedServer, reference: Reference
) -> None:
    path = "/v1/completions"
    for prompt in reference.prompts[:6]:
        whole = ask(dflash, completion(prompt), path)
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
        whole = ask(dflash, chat(question), path)["choices"][0]
        deltas = [
            choice["delta"]
            for event in stream(dflash, chat(question), path)
            for choice in event["choices"]
        ]
        joined = "".join(delta.get("content") or "" for delta in deltas)
        assert joined == whole["message"]["content"]
