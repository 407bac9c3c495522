"""Times between tokens, and that they are those of the parts that came."""

from __future__ import annotations

import pytest

from bench.gpu.serve.streams import Streamed, StreamError, quantile, send_all, stream, summarize
from launch.client import Answer
from tests.unit.bench.gpu_serve.stub import Script, StubServer


def streamed(*arrivals: tuple[float, int], sent: float = 0.0, verifies: int = 0) -> Streamed:
    tokens = arrivals[-1][1]
    meta = {"completion_tokens": tokens, "spec_verify_ct": verifies}
    return Streamed(Answer("", tuple(range(tokens)), meta), sent, arrivals)


def test_the_gap_of_a_part_is_shared_out_over_its_tokens() -> None:
    # 1 token, 4 after 0.4 s, 2 after 1 s: 0.1 four times, 0.5 twice.
    numbers = summarize([streamed((1.0, 1), (1.4, 5), (2.4, 7), sent=0.8)], seconds=3.5)
    assert numbers.p50_ms == pytest.approx(100)
    assert numbers.p99_ms == pytest.approx(500)
    assert numbers.longest_gap_ms == pytest.approx(1000)
    assert numbers.first_token_ms == pytest.approx(200)
    assert numbers.tokens_per_s == 2.0


def test_parts_that_were_read_together_are_one() -> None:
    # A busy client reads the buffered parts of 3 tokens at once: 0.3 s for 3 tokens, not 0 for two.
    numbers = summarize([streamed((0.0, 1), (0.3, 2), (0.30001, 3), (0.30002, 4))], 1.0)
    assert (numbers.p50_ms, numbers.p99_ms) == pytest.approx((100, 100))
    assert numbers.longest_gap_ms == pytest.approx(300)


def test_one_stall_shows_as_the_longest_gap_even_if_it_is_one_of_many() -> None:
    steady = [streamed(*((0.01 * i, i + 1) for i in range(500))) for _ in range(4)]
    stalled = streamed((0.0, 1), (5.0, 2))
    numbers = summarize([*steady, stalled], 10.0)
    assert numbers.longest_gap_ms == pytest.approx(5000)
    assert numbers.p99_ms == pytest.approx(10, rel=0.01)


def test_tau_counts_verifies_and_not_parts() -> None:
    assert summarize([streamed((0.0, 1), (1.0, 9), verifies=2)], 1.0).tau == 4.0


def test_an_answer_of_one_token_has_no_gaps() -> None:
    numbers = summarize([streamed((0.5, 1))], 1.0)
    assert (numbers.p50_ms, numbers.longest_gap_ms) == (None, None)


@pytest.mark.parametrize(("share", "expected"), [(0.5, 2.0), (0.99, 4.0), (0.25, 1.0), (0.26, 2.0)])
def test_quantiles(share: float, expected: float) -> None:
    assert quantile([1.0, 2.0, 3.0, 4.0], share) == expected


def test_the_answer_is_the_last_part_and_its_parts_ascend(server: StubServer) -> None:
    one = stream(server, {"input_ids": [1, 2], "sampling_params": {}})
    assert len(one.answer.output_ids) == 9
    assert [tokens for _, tokens in one.arrivals] == [1, 5, 9]
    times = [at for at, _ in one.arrivals]
    assert times == sorted(times)
    assert one.sent < times[0]


def test_prompts_are_answered_in_their_order(server: StubServer, script: Script) -> None:
    prompts = [[number] for number in range(6)]
    answers, _ = send_all(server, prompts, 3, {"temperature": 0}, 9)
    expected = [tuple(script.answer("adaptive", prompt)) for prompt in prompts]
    assert [one.answer.output_ids for one in answers] == expected


def test_an_answer_that_breaks_off_is_an_error(server: StubServer, script: Script) -> None:
    script.breaks.add("adaptive")
    with pytest.raises(StreamError, match="without"):
        stream(server, {"input_ids": [1], "sampling_params": {}})
