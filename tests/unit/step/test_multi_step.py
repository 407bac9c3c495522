"""Runs of plain tokens: what they commit, and where they stop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dflash_kernels.accept_match import accept_match
from dflash_kernels.types import Acceptance

from dflash_sglang.step import multi_step as plain_run
from dflash_sglang.step.multi_step import Ends, advance, joined
from dflash_sglang.step.stop_ids import stop_ids

END = 2


def accepted(ids: list[int], lens: list[int]) -> Acceptance:
    targets = torch.tensor(ids)[:, None]
    return accept_match(targets, targets, torch.tensor(lens))


def request_with(output: int = 0, **changed: Any) -> Any:
    params = {"max_new_tokens": 10, "ignore_eos": False, "stop_token_ids": None, **changed}
    tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=END)
    return SimpleNamespace(
        sampling_params=SimpleNamespace(**params),
        output_ids=[7] * output,
        eos_token_ids={END},
        tokenizer=tokenizer,
    )


def batch_of(reqs: list[Any]) -> Any:
    return SimpleNamespace(reqs=reqs, mamba_track_indices=None)


def test_a_run_commits_every_token_and_no_draft() -> None:
    got = joined([accepted([5, 8], [3, 9]), accepted([6, 9], [4, 10]), accepted([7, 1], [5, 11])])
    assert got.output_ids.tolist() == [[5, 6, 7], [8, 9, 1]]
    assert got.commit_len.tolist() == [3, 3]
    assert got.accept_len.tolist() == [0, 0]
    assert got.bonus_ids.tolist() == [7, 1]
    assert got.new_seq_lens.tolist() == [6, 12]


def test_a_run_of_one_request_stops_at_its_end() -> None:
    ends = Ends(batch_of([request_with()]), strict=False)
    assert not ends.reached(accepted([5], [1]), 1)
    assert ends.reached(accepted([END], [1]), 2)
    assert ends.tokens == [2]


def test_a_run_stops_at_a_stop_token() -> None:
    ends = Ends(batch_of([request_with(stop_token_ids={5})]), strict=False)
    assert ends.reached(accepted([5], [1]), 1)


def test_a_run_of_many_goes_on_while_little_is_wasted() -> None:
    """One of four has ended: its next two tokens are half a pass."""
    ends = Ends(batch_of([request_with() for _ in range(4)]), strict=False)
    rows, lens = [5] * 3, [1] * 4
    assert not ends.reached(accepted([END, *rows], lens), 1)
    assert not ends.reached(accepted([9, *rows], lens), 2)
    assert ends.reached(accepted([9, *rows], lens), 3)
    assert ends.tokens == [1] + [3] * 3


def test_two_ends_are_wasted_twice_as_fast() -> None:
    ends = Ends(batch_of([request_with() for _ in range(4)]), strict=False)
    assert not ends.reached(accepted([END, END, 5, 5], [1] * 4), 1)
    assert ends.reached(accepted([5] * 4, [1] * 4), 2)


def test_a_run_that_hands_on_states_stops_at_the_first_end() -> None:
    ends = Ends(batch_of([request_with() for _ in range(8)]), strict=True)
    assert not ends.reached(accepted([5] * 8, [1] * 8), 1)
    assert ends.reached(accepted([5, END, *[5] * 6], [1] * 8), 2)


def test_a_server_without_tokenizer_knows_the_checkpoints_ends() -> None:
    req = request_with(stop_token_ids={5})
    req.tokenizer = None
    assert stop_ids(req) == {5, END}


def test_a_run_goes_on_where_ends_are_ignored() -> None:
    req = request_with(ignore_eos=True, stop_token_ids={5})
    ends = Ends(batch_of([req]), strict=True)
    assert not ends.reached(accepted([END], [1]), 1)
    assert not ends.reached(accepted([5], [1]), 2)


def test_a_length_limit_is_an_end() -> None:
    reqs = [request_with(output=7), request_with(output=2)]
    ends = Ends(batch_of(reqs), strict=True)
    assert not ends.reached(accepted([5, 6], [1, 1]), 1)
    assert not ends.reached(accepted([5, 6], [1, 1]), 2)
    assert ends.reached(accepted([5, 6], [1, 1]), 3)


@pytest.mark.parametrize(("lens", "most"), [([60, 100], 4), ([64, 100], 28), ([127, 3], 1)])
def test_a_run_stops_where_a_state_is_kept(
    monkeypatch: pytest.MonkeyPatch, lens: list[int], most: int
) -> None:
    """The scheduler finds out about it only when it is the last token of a run."""
    monkeypatch.setattr(plain_run, "mamba_track_grid", lambda page_size: 64)
    batch = batch_of([request_with(max_new_tokens=99), request_with(max_new_tokens=99)])
    batch.mamba_track_indices = torch.tensor([5, 7])
    batch.tree_cache = SimpleNamespace(page_size=1)
    batch.seq_lens_cpu = torch.tensor(lens)
    ends = Ends(batch, strict=True)
    assert not ends.reached(accepted([5, 6], [1, 1]), most - 1)
    assert ends.reached(accepted([5, 6], [1, 1]), most)


def test_the_batch_moves_on_by_one_token() -> None:
    batch: Any = SimpleNamespace(
        reqs=[None, None],
        seq_lens=torch.tensor([3, 9]),
        seq_lens_cpu=torch.tensor([3, 9]),
        seq_lens_sum=12,
    )
    advance(batch, accepted([5, 6], [3, 9]))
    assert batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist() == [4, 10]
    assert batch.seq_lens_sum == 14
