"""The end of a request inside an accepted run is the first one that plain decoding would meet."""

from types import SimpleNamespace
from typing import Any

import pytest

from dflash_sglang.step.finish import finish_token_by_token

END_OF_TEXT, NEWLINE = 2, 10


def request_with(output_ids: list[int], **changes: Any) -> SimpleNamespace:
    req = SimpleNamespace(
        output_ids=output_ids,
        sampling_params=SimpleNamespace(stop_strs=["\n"], stop_regex_strs=[]),
        grammar=None,
        finished_len=None,
        reasoning_tokens=0,
        reason=None,
        calls=[],
    )
    req.finished = lambda: req.reason is not None
    for name, value in changes.items():
        setattr(req, name, value)
    return req


def sglangs_order(req: SimpleNamespace, new_accepted_len: int) -> None:
    """Stop strings over the whole run, then stop tokens, then the grammar: as SGLang does."""
    req.calls.append((len(req.output_ids), new_accepted_len))
    run = req.output_ids[-new_accepted_len:]
    if NEWLINE in run:
        req.reason = "string"
    elif END_OF_TEXT in run:
        req.reason = "token"
    elif req.grammar == "terminated":
        req.reason = "grammar"


@pytest.mark.parametrize(
    ("run", "reason", "length"),
    [
        ([5, END_OF_TEXT, NEWLINE, 7], "token", 3),  # the end of text comes first
        ([5, NEWLINE, END_OF_TEXT], "string", 3),
        ([5, 6, 7], None, None),
        ([5, 6, END_OF_TEXT], "token", 4),
    ],
)
def test_the_first_end_wins(run: list[int], reason: str | None, length: int | None) -> None:
    req = request_with([4, *run])
    finish_token_by_token(sglangs_order, req, len(run))
    assert (req.reason, req.finished_len) == (reason, length)
    assert req.output_ids == [4, *run]


def test_a_grammar_ends_a_run_at_its_end_only() -> None:
    req = request_with([4, 5, 6, 7], grammar="terminated")
    finish_token_by_token(sglangs_order, req, 3)
    assert (req.reason, req.finished_len) == ("grammar", 4)
    assert req.grammar == "terminated"


@pytest.mark.parametrize("stops", [[], ["\n"]])
def test_a_single_token_and_requests_without_stop_strings_are_left_alone(stops: list[str]) -> None:
    req = request_with([4, 5, 6, 7])
    req.sampling_params.stop_strs = stops
    finish_token_by_token(sglangs_order, req, 1 if stops else 3)
    assert req.calls == [(4, 1 if stops else 3)]


def test_reasoning_past_the_end_is_not_counted() -> None:
    # SGLang counts the whole run before it looks for the end.
    req = request_with([4, 5, NEWLINE, 6, 7], reasoning_tokens=5)
    finish_token_by_token(sglangs_order, req, 4)
    assert (req.finished_len, req.reasoning_tokens) == (3, 3)


def test_reasoning_that_ended_earlier_stays() -> None:
    req = request_with([4, 5, NEWLINE, 6, 7], reasoning_tokens=1)
    finish_token_by_token(sglangs_order, req, 4)
    assert (req.finished_len, req.reasoning_tokens) == (3, 1)
