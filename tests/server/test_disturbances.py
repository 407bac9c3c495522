"""A request that is aborted, malformed or refused affects no other and leaves no slot behind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from bench.harness.requests import events, greedy, send, send_all
from bench.harness.servers import TestedServer
from tests.support.reference import Reference, others_running

LONG = 1500  # tokens: seconds of decoding, unless it is aborted

MALFORMED: dict[str, Any] = {
    "no prompt": {"sampling_params": {"temperature": 0}},
    "prompt of the wrong type": {"text": 5},
    "unknown parameter": greedy("x", temprature=1),
    "parameter of the wrong type": greedy("x", top_p="high"),
    "negative length": greedy("x", -3),
    "prompt longer than the context": greedy([7] * 4000),
    "more tokens than the context has": greedy("x", 5000),
    "unbalanced expression": greedy("x", regex="("),
    "schema that is no JSON": greedy("x", json_schema="{"),
}


def open_stream(server: TestedServer, rid: str) -> tuple[Any, Iterator[Any]]:
    """A long request that has begun to answer."""
    payload = {**greedy(f"Count up: {rid}", LONG, ignore_eos=True), "rid": rid, "stream": True}
    response = server.open("/generate", payload)
    answer = events(response)
    next(answer)
    return response, answer


def test_a_client_that_hangs_up(dflash: TestedServer, reference: Reference) -> None:
    with others_running(dflash, reference):
        for number in range(3):
            response, _ = open_stream(dflash, f"hang-up-{number}")
            response.close()
    dflash.check_idle()


def test_abort_by_id(dflash: TestedServer, reference: Reference) -> None:
    with others_running(dflash, reference):
        streams = {rid: open_stream(dflash, rid) for rid in ("abort-1", "abort-2")}
        for rid, (_, answer) in streams.items():
            dflash.open("/abort_request", {"rid": rid}).close()
            last = list(answer)[-1]
            assert last["meta_info"]["finish_reason"]["type"] == "abort"
            assert last["meta_info"]["completion_tokens"] < LONG


def test_abort_all(dflash: TestedServer) -> None:
    streams = [open_stream(dflash, f"all-{number}") for number in range(4)]
    dflash.open("/abort_request", {"rid": "", "abort_all": True}).close()
    for _, answer in streams:
        assert list(answer)[-1]["meta_info"]["finish_reason"]["type"] == "abort"


def test_aborts_at_any_moment(dflash: TestedServer, reference: Reference) -> None:
    # Waiting, in prefill, between two steps: whatever each is in when the abort arrives.
    payloads = [
        {**greedy(prompt, LONG, ignore_eos=True), "rid": f"moment-{place}"}
        for place, prompt in enumerate(reference.prompts)
    ]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(send_all, dflash, payloads, len(payloads))
        for payload in payloads:
            time.sleep(0.01)
            dflash.open("/abort_request", {"rid": payload["rid"]}).close()
        # One that had not arrived yet was not there to be aborted.
        while not running.done():
            dflash.open("/abort_request", {"rid": "", "abort_all": True}).close()
            time.sleep(0.1)
    with others_running(dflash, reference):
        pass


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_request_gets_a_400(
    plain: TestedServer, dflash: TestedServer, kind: str
) -> None:
    expected, got = send(plain, MALFORMED[kind]), send(dflash, MALFORMED[kind])
    assert got[0] == expected[0] == 400
    assert got[1] == expected[1]


def test_malformed_requests_affect_no_other(dflash: TestedServer, reference: Reference) -> None:
    with others_running(dflash, reference):
        for _ in range(3):
            send_all(dflash, list(MALFORMED.values()))


def test_sampled_neighbours_change_no_greedy_answer(
    dflash: TestedServer, reference: Reference
) -> None:
    # A mixed batch goes another way through the sampler than one that is all greedy.
    neighbours = [
        {
            **greedy(prompt, 64, temperature=0.9, top_p=0.9, repetition_penalty=1.1),
            "rid": f"sampled-{place}",
        }
        for place, prompt in enumerate(reference.prompts)
    ]
    with others_running(dflash, reference):
        sampled = send_all(dflash, neighbours)
    assert all(one["meta_info"]["completion_tokens"] > 0 for one in sampled)


def test_a_refusal_names_the_parameter_and_the_way_out(
    dflash: TestedServer, reference: Reference
) -> None:
    # The other parameters that the worker refuses, SGLang refuses first unless a flag allows them.
    with others_running(dflash, reference):
        refused = {**greedy(reference.prompts[0]), "return_sampling_mask": True}
        status, body = send(dflash, refused)
    assert status == 400
    assert "return_sampling_mask" in body
    assert "without --speculative-algorithm DFLASH" in body
