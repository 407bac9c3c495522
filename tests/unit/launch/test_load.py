"""The load client: what is sent, tau, and whether answers are the same."""

import threading

import pytest

from launch import load
from launch.client import Answer, RequestError
from tests.unit.launch.stub_server import Canned, serve


def answer(ids: list[int], verifies: int = 0) -> Answer:
    meta = {"completion_tokens": len(ids), **({"spec_verify_ct": verifies} if verifies else {})}
    return Answer("", tuple(ids), meta)


def test_answers_come_in_the_order_of_the_prompts() -> None:
    first_waits = threading.Event()

    def reply(prompt: str) -> Canned:
        if prompt == "0":
            first_waits.wait(10)  # overtaken by all others
        if prompt == "5":
            first_waits.set()
        return Canned([int(prompt)])

    with serve(reply) as stub:
        done = load.run(stub.client, [str(i) for i in range(6)], 2, 16)
    assert [one.output_ids for one in done.answers] == [(i,) for i in range(6)]


def test_sends_greedy_requests_after_emptying_the_cache() -> None:
    with serve(lambda _: Canned([1])) as stub:
        load.run(stub.client, ["a"], 1, 7)
    (flush, _), (path, body) = stub.requests
    assert flush.startswith("/flush_cache")
    assert path == "/generate"
    assert body == {"text": "a", "sampling_params": {"max_new_tokens": 7, "temperature": 0.0}}


def test_keeps_exactly_so_many_requests_in_flight() -> None:
    # A barrier passes only when 3 requests are there at once.
    barrier = threading.Barrier(3)

    def reply(_: str) -> Canned:
        barrier.wait(10)
        return Canned([1])

    with serve(reply) as stub:
        load.run(stub.client, ["a"] * 9, 3, 16)
        assert stub.most_in_flight() == 3


def test_counts_every_answer() -> None:
    seen = []
    with serve(lambda _: Canned([1, 2, 3, 4])) as stub:
        done = load.run(stub.client, ["a"] * 5, 2, 16, lambda: seen.append(1))
    assert len(seen) == 5
    assert done.tokens_per_s == pytest.approx(20 / done.seconds)


def test_a_refused_request_ends_the_pass() -> None:
    with (
        serve(lambda prompt: None if prompt == "bad" else Canned([1])) as stub,
        pytest.raises(RequestError, match=r"HTTP 400.*refused") as caught,
    ):
        load.run(stub.client, ["ok", "bad", "ok"], 1, 16)
    assert caught.value.status == 400


def test_tau_leaves_out_the_token_of_prefill() -> None:
    # 1 token from prefill, then verifies that committed 4 and 4.
    assert load.tau([answer(list(range(9)), 2)]) == 4.0


def test_tau_weighs_answers_by_their_verifies() -> None:
    # The mean of the two ratios would be 3.5.
    assert load.tau([answer(list(range(7)), 1), answer(list(range(4)), 3)]) == 9 / 4


def test_tau_with_an_answer_that_prefill_ended() -> None:
    # Its only token is the stop token; SGLang then leaves the counter out.
    assert load.tau([answer([2]), answer(list(range(7)), 2)]) == 3.0


def test_tau_of_plain_decoding() -> None:
    assert load.tau([answer([1, 2, 3])]) == 1.0


def test_no_difference() -> None:
    assert load.first_difference([answer([1, 2])], [answer([1, 2], 1)]) is None


@pytest.mark.parametrize(
    ("got", "position"), [([1, 9, 3], 1), ([9, 2, 3], 0), ([1, 2], 2), ([1, 2, 3, 4], 3), ([], 0)]
)
def test_first_difference_also_where_one_answer_is_longer(got: list[int], position: int) -> None:
    expected = [answer([5]), answer([1, 2, 3])]
    different = load.first_difference(expected, [answer([5]), answer(got)])
    assert different == (1, position, (1, 2, 3), tuple(got))


def test_passes_of_different_length_cannot_be_compared() -> None:
    # A lost answer must not count as identical.
    with pytest.raises(ValueError, match="shorter"):
        load.first_difference([answer([1]), answer([2])], [answer([1])])
