"""The end of a request among several tokens that are committed at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dflash_kernels.accept_match import accept_match
from dflash_kernels.types import Acceptance

from dflash_sglang.step import end_of_request
from dflash_sglang.step.end_of_request import (
    caches_final_state,
    finish_token_by_token,
    stop_ids,
    truncate_at_end,
)
from tests.support.requests import MAX_NEW_TOKENS, batch_of, request_with

END, STOP, NEWLINE = 2, 9, 10


def test_a_server_without_tokenizer_knows_the_checkpoints_stop_tokens() -> None:
    assert stop_ids(request_with(stop_token_ids={5}, eos_token_ids={END}, tokenizer=None)) == {
        5,
        END,
    }


# ---- truncation, where the prefix cache takes over a recurrent state -----------------------------


def truncate_at_ends(
    batch: Any,
    accepted: Acceptance,
    recurrent: bool = True,
    radix: bool = True,
    buffer: bool = False,
) -> Acceptance:
    """By a server of this kind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(end_of_request, "mambaish_config", lambda config: config)
        patch.setattr(
            end_of_request, "get_memory", lambda: SimpleNamespace(disable_radix_cache=not radix)
        )
        mamba = SimpleNamespace(enable_mamba_extra_buffer=buffer)
        patch.setattr(end_of_request, "get_exec", lambda: SimpleNamespace(mamba=mamba))
        config = object() if recurrent else None
        cached = caches_final_state(SimpleNamespace(model_config=config))  # type: ignore[arg-type]
    return truncate_at_end(batch, accepted) if cached else accepted


def ending_request(left: int = MAX_NEW_TOKENS, **changes: Any) -> Any:
    """A request with `left` tokens until its length limit."""
    return request_with(
        [7] * (MAX_NEW_TOKENS - left), eos_token_ids={END}, tokenizer=None, **changes
    )


def accepted(rows: list[list[int]], wrong: list[int] | None = None) -> Acceptance:
    """Of drafts that all match, or mismatch at the given places, behind 10 tokens."""
    verifier_ids = torch.tensor(rows)
    drafts = torch.cat([torch.zeros_like(verifier_ids[:, :1]), verifier_ids[:, :-1]], dim=1)
    for row, place in enumerate(wrong or []):
        drafts[row, place] += 1
    return accept_match(drafts, verifier_ids, torch.full((len(rows),), 10))


def committed(got: Acceptance) -> list[list[int]]:
    """What the acceptance commits, its fields found to agree."""
    lens = got.commit_len.tolist()
    rows = [ids[:n] for ids, n in zip(got.output_ids.tolist(), lens, strict=True)]
    assert got.accept_len.tolist() == [len(row) - 1 for row in rows]
    assert got.bonus_ids.tolist() == [row[-1] for row in rows]
    assert got.new_seq_lens.tolist() == [10 + len(row) for row in rows]
    assert got.commit_len.dtype == got.accept_len.dtype == torch.int32
    assert got.bonus_ids.dtype == got.new_seq_lens.dtype == torch.int64
    return rows


def test_truncated_behind_the_first_end() -> None:
    # An end as the first token, inside, as the last; two of them; a stop token; none.
    rows = [[END, 5, 6, 7], [5, END, 6, 7], [5, 6, 7, END], [5, END, END, 8], [5, 6, STOP, END]]
    rows.append([5, 6, 7, 8])
    reqs = [ending_request() for _ in rows]
    reqs[4] = ending_request(stop_token_ids={STOP})
    got = truncate_at_ends(batch_of(*reqs), accepted(rows))
    assert committed(got) == [[END], [5, END], [5, 6, 7, END], [5, END], [5, 6, STOP], rows[5]]


def test_an_end_behind_a_wrong_draft_does_not_count() -> None:
    got = truncate_at_ends(batch_of(ending_request()), accepted([[5, 6, END, 7]], wrong=[2]))
    assert committed(got) == [[5, 6]]


def test_another_requests_stop_token_ends_nothing() -> None:
    reqs = ending_request(stop_token_ids={STOP}), ending_request(), ending_request(ignore_eos=True)
    rows = [[5, STOP, 6, 7], [5, STOP, 6, 7], [5, END, 6, 7]]
    got = truncate_at_ends(batch_of(*reqs), accepted(rows))
    assert committed(got) == [[5, STOP], rows[1], rows[2]]


def test_truncated_at_the_length_limit() -> None:
    # Without any stop token too.
    reqs = [ending_request(left=left, ignore_eos=True) for left in (1, 3, 4, 60)]
    row = [5, 6, 7, 8]
    got = truncate_at_ends(batch_of(*reqs), accepted([row] * 4))
    assert committed(got) == [row[:1], row[:3], row, row]


@pytest.mark.parametrize(
    "server",
    [{"buffer": True}, {"radix": False}, {"recurrent": False}],
    ids=["buffers", "no cache", "attention only"],
)
def test_nothing_is_truncated_where_no_state_is_cached(server: dict[str, bool]) -> None:
    whole = accepted([[5, END, 6, 7]])
    assert truncate_at_ends(batch_of(ending_request()), whole, **server) is whole


# ---- SGLang's search for the end, token by token -------------------------------------------------


def searched_request(output_ids: list[int], **changes: Any) -> Any:
    """A request that stops at a newline and records the calls of SGLang's method."""
    req = request_with(output_ids, stop_strs=["\n"], reason=None, calls=[], **changes)
    req.finished = lambda: req.reason is not None
    return req


def sglangs_order(req: SimpleNamespace, new_accepted_len: int) -> None:
    """Stop strings in all new tokens, then stop tokens, then the grammar: as SGLang does."""
    req.calls.append((len(req.output_ids), new_accepted_len))
    new = req.output_ids[-new_accepted_len:]
    if NEWLINE in new:
        req.reason = "string"
    elif END in new:
        req.reason = "token"
    elif req.grammar == "terminated":
        req.reason = "grammar"


@pytest.mark.parametrize(
    ("run", "reason", "length"),
    [
        ([5, END, NEWLINE, 7], "token", 3),  # the end of text comes first
        ([5, NEWLINE, END], "string", 3),
        ([5, 6, 7], None, None),
        ([5, 6, END], "token", 4),
    ],
)
def test_the_first_end_wins(run: list[int], reason: str | None, length: int | None) -> None:
    req = searched_request([4, *run])
    finish_token_by_token(sglangs_order, req, len(run))
    assert (req.reason, req.finished_len) == (reason, length)
    assert req.output_ids == [4, *run]


def test_a_grammar_ends_a_request_at_the_last_token_only() -> None:
    req = searched_request([4, 5, 6, 7], grammar="terminated")
    finish_token_by_token(sglangs_order, req, 3)
    assert (req.reason, req.finished_len) == ("grammar", 4)
    assert req.grammar == "terminated"


@pytest.mark.parametrize("stops", [[], ["\n"]])
def test_a_single_token_and_requests_without_stop_strings_are_left_alone(stops: list[str]) -> None:
    req = searched_request([4, 5, 6, 7])
    req.sampling_params.stop_strs = stops
    finish_token_by_token(sglangs_order, req, 1 if stops else 3)
    assert req.calls == [(4, 1 if stops else 3)]


def test_reasoning_past_the_end_is_not_counted() -> None:
    # SGLang counts all new tokens before it looks for the end.
    req = searched_request([4, 5, NEWLINE, 6, 7], reasoning_tokens=5)
    finish_token_by_token(sglangs_order, req, 4)
    assert (req.finished_len, req.reasoning_tokens) == (3, 3)


def test_reasoning_that_ended_earlier_stays() -> None:
    req = searched_request([4, 5, NEWLINE, 6, 7], reasoning_tokens=1)
    finish_token_by_token(sglangs_order, req, 4)
    assert (req.finished_len, req.reasoning_tokens) == (3, 1)
