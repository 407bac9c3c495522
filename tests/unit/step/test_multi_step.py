"""Multi-step decoding: what it commits, and where it stops."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dflash_kernels.accept_match import accept_match
from dflash_kernels.types import Acceptance

from dflash_sglang.step import multi_step
from dflash_sglang.step.multi_step import (
    Ends,
    MultiStep,
    advance,
    can_multi_step,
    concat_acceptances,
    max_forwards,
)
from dflash_sglang.step.verify import StepOutput
from tests.support.requests import batch_of, request_with

END = 2


def accepted(ids: list[int], lens: list[int]) -> Acceptance:
    verifier_ids = torch.tensor(ids)[:, None]
    return accept_match(verifier_ids, verifier_ids, torch.tensor(lens))


def ending_request(**changes: Any) -> Any:
    return request_with(**{"max_new_tokens": 10, "eos_token_ids": {END}, **changes})


def test_a_step_commits_every_token_and_no_draft() -> None:
    got = concat_acceptances(
        [accepted([5, 8], [3, 9]), accepted([6, 9], [4, 10]), accepted([7, 1], [5, 11])]
    )
    assert got.output_ids.tolist() == [[5, 6, 7], [8, 9, 1]]
    assert got.commit_len.tolist() == [3, 3]
    assert got.accept_len.tolist() == [0, 0]
    assert got.bonus_ids.tolist() == [7, 1]
    assert got.new_seq_lens.tolist() == [6, 12]


def test_one_request_stops_at_its_end() -> None:
    ends = Ends(batch_of(ending_request()), strict=False)
    assert not ends.reached(accepted([5], [1]), 1)
    assert ends.reached(accepted([END], [1]), 2)
    assert ends.tokens == [2]


def test_a_stop_token_is_an_end() -> None:
    ends = Ends(batch_of(ending_request(stop_token_ids={5})), strict=False)
    assert ends.reached(accepted([5], [1]), 1)


def test_many_requests_continue_while_little_is_wasted() -> None:
    """One of four has ended: its next two tokens are half a forward."""
    ends = Ends(batch_of(*[ending_request() for _ in range(4)]), strict=False)
    rows, lens = [5] * 3, [1] * 4
    assert not ends.reached(accepted([END, *rows], lens), 1)
    assert not ends.reached(accepted([9, *rows], lens), 2)
    assert ends.reached(accepted([9, *rows], lens), 3)
    assert ends.tokens == [1] + [3] * 3


def test_two_ends_are_wasted_twice_as_fast() -> None:
    ends = Ends(batch_of(*[ending_request() for _ in range(4)]), strict=False)
    assert not ends.reached(accepted([END, END, 5, 5], [1] * 4), 1)
    assert ends.reached(accepted([5] * 4, [1] * 4), 2)


def test_recurrent_states_stop_at_the_first_end() -> None:
    ends = Ends(batch_of(*[ending_request() for _ in range(8)]), strict=True)
    assert not ends.reached(accepted([5] * 8, [1] * 8), 1)
    assert ends.reached(accepted([5, END, *[5] * 6], [1] * 8), 2)


def test_ignored_ends_are_no_ends() -> None:
    req = ending_request(ignore_eos=True, stop_token_ids={5})
    ends = Ends(batch_of(req), strict=True)
    assert not ends.reached(accepted([END], [1]), 1)
    assert not ends.reached(accepted([5], [1]), 2)


def test_a_length_limit_is_an_end() -> None:
    reqs = [ending_request(output_ids=[7] * 7), ending_request(output_ids=[7] * 2)]
    ends = Ends(batch_of(*reqs), strict=True)
    assert not ends.reached(accepted([5, 6], [1, 1]), 1)
    assert not ends.reached(accepted([5, 6], [1, 1]), 2)
    assert ends.reached(accepted([5, 6], [1, 1]), 3)


@pytest.mark.parametrize(("lens", "most"), [([60, 100], 4), ([64, 100], 28), ([127, 3], 1)])
def test_stops_where_a_state_is_tracked(
    monkeypatch: pytest.MonkeyPatch, lens: list[int], most: int
) -> None:
    """The scheduler looks for it at the last token of a step only."""
    monkeypatch.setattr(multi_step, "mamba_track_grid", lambda page_size: 64)
    batch = batch_of(*[ending_request(max_new_tokens=99) for _ in range(2)])
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


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Settings of a server without overlap."""
    settings = SimpleNamespace(
        disable_overlap_schedule=True,
        enable_return_routed_experts=False,
        enable_return_indexer_topk=False,
    )
    monkeypatch.setattr(multi_step, "get_schedule", lambda: settings)
    monkeypatch.setattr(multi_step, "get_exec", lambda: SimpleNamespace(features=settings))
    return settings


def test_only_plain_requests_without_overlap(server: SimpleNamespace) -> None:
    assert can_multi_step(batch_of(ending_request()))
    for held in ({"grammar": "{}"}, {"return_logprob": True}, {"custom_logit_processor": "{}"}):
        assert not can_multi_step(batch_of(ending_request(), ending_request(**held)))
    server.enable_return_routed_experts = True  # those of all but the last forward would be lost
    assert not can_multi_step(batch_of(ending_request()))
    server.enable_return_routed_experts, server.disable_overlap_schedule = False, False
    assert not can_multi_step(batch_of(ending_request()))


@pytest.mark.parametrize(
    ("seconds", "block_size", "forwards"),
    [(0.002, 16, 16), (0.002, 4, 4), (0.007, 16, 5), (1.0, 16, 1), (None, 16, 6), (None, 2, 2)],
)
def test_a_step_takes_no_longer_than_a_wide_verify(
    seconds: float | None, block_size: int, forwards: int
) -> None:
    """And no more slots than every step reserves: a block's."""
    assert max_forwards(seconds, block_size) == forwards


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(
    ("seconds", "tokens"), [(1.0, [5]), (0.02, [5, 6]), (0.001, [5, 6, 7, END])]
)
def test_a_step_is_extended_until_its_time_is_over_or_its_requests(
    seconds: float, tokens: list[int]
) -> None:
    following = iter([6, 7, END, 9])
    req = ending_request(spec_verify_ct=1)
    batch = batch_of(req, lens=[3], seq_lens_cpu=torch.tensor([3]), seq_lens_sum=3)

    def decode_token(batch: Any, anchor_ids: torch.Tensor) -> StepOutput:
        lens = batch.seq_lens.tolist()
        return StepOutput(None, accepted([next(following)], lens))  # type: ignore[arg-type]

    first = StepOutput(None, accepted([5], [3]))  # type: ignore[arg-type]
    extension = MultiStep(recurrent=False)
    output = extension.extend(batch, first, max_forwards(seconds, 16), decode_token)
    assert output.accepted.output_ids.tolist() == [tokens]
    assert output.accepted.new_seq_lens.tolist() == [3 + len(tokens)]
    assert output.forwards == req.spec_verify_ct == len(tokens)
