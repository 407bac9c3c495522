"""Accepted runs that stop where a request ends, for a prefix cache that takes its state over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dflash_kernels.accept_match import accept_match
from dflash_kernels.types import Acceptance

from dflash_sglang.step import run_ends
from dflash_sglang.step.run_ends import RunEnds

END, STOP = 2, 9


def stop_at_ends(
    batch: Any,
    accepted: Acceptance,
    recurrent: bool = True,
    radix: bool = True,
    buffer: bool = False,
) -> Acceptance:
    """By a server of this kind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_ends, "mambaish_config", lambda config: config)
        patch.setattr(
            run_ends, "get_memory", lambda: SimpleNamespace(disable_radix_cache=not radix)
        )
        mamba = SimpleNamespace(enable_mamba_extra_buffer=buffer)
        patch.setattr(run_ends, "get_exec", lambda: SimpleNamespace(mamba=mamba))
        config = object() if recurrent else None
        ends = RunEnds(SimpleNamespace(model_config=config))
    return ends.stop(batch, accepted)


def request_with(left: int = 100, **changed: Any) -> Any:
    params = {"max_new_tokens": 100, "ignore_eos": False, "stop_token_ids": None, **changed}
    return SimpleNamespace(
        sampling_params=SimpleNamespace(**params),
        output_ids=[7] * (100 - left),
        eos_token_ids={END},
        tokenizer=None,
    )


def batch_of(*reqs: Any) -> Any:
    return SimpleNamespace(reqs=reqs)


def accepted(rows: list[list[int]], wrong: list[int] | None = None) -> Acceptance:
    """Of drafts that are all right, or wrong at the given places; 10 tokens lie before them."""
    targets = torch.tensor(rows)
    drafts = torch.cat([torch.zeros_like(targets[:, :1]), targets[:, :-1]], dim=1)
    for row, place in enumerate(wrong or []):
        drafts[row, place] += 1
    return accept_match(drafts, targets, torch.full((len(rows),), 10))


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


def test_a_run_stops_behind_its_first_end() -> None:
    # An end as the first token, inside, as the last; two of them; a stop token; none.
    rows = [[END, 5, 6, 7], [5, END, 6, 7], [5, 6, 7, END], [5, END, END, 8], [5, 6, STOP, END]]
    rows.append([5, 6, 7, 8])
    reqs = [request_with() for _ in rows]
    reqs[4] = request_with(stop_token_ids={STOP})
    got = stop_at_ends(batch_of(*reqs), accepted(rows))
    assert committed(got) == [[END], [5, END], [5, 6, 7, END], [5, END], [5, 6, STOP], rows[5]]


def test_an_end_behind_a_wrong_draft_does_not_count() -> None:
    got = stop_at_ends(batch_of(request_with()), accepted([[5, 6, END, 7]], wrong=[2]))
    assert committed(got) == [[5, 6]]


def test_another_requests_stop_token_ends_nothing() -> None:
    reqs = request_with(stop_token_ids={STOP}), request_with(), request_with(ignore_eos=True)
    rows = [[5, STOP, 6, 7], [5, STOP, 6, 7], [5, END, 6, 7]]
    got = stop_at_ends(batch_of(*reqs), accepted(rows))
    assert committed(got) == [[5, STOP], rows[1], rows[2]]


def test_a_run_stops_at_the_length_limit() -> None:
    # Without any stop token too.
    reqs = [request_with(left=left, ignore_eos=True) for left in (1, 3, 4, 60)]
    row = [5, 6, 7, 8]
    got = stop_at_ends(batch_of(*reqs), accepted([row] * 4))
    assert committed(got) == [row[:1], row[:3], row, row]


def test_a_single_token_is_left_as_it_is() -> None:
    single = accepted([[END]])
    assert stop_at_ends(batch_of(request_with(left=1)), single) is single


@pytest.mark.parametrize(
    "server",
    [{"buffer": True}, {"radix": False}, {"recurrent": False}],
    ids=["buffers", "no cache", "attention only"],
)
def test_where_no_state_is_handed_on_a_run_stays_whole(server: dict[str, bool]) -> None:
    whole = accepted([[5, END, 6, 7]])
    assert stop_at_ends(batch_of(request_with()), whole, **server) is whole
