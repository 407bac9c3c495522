"""Which batches one op draws for, and what it makes of their sampling parameters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dflash_kernels.accept_match import accept_match
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite

from dflash_sglang.core.accept import Rule
from dflash_sglang.step import accept
from dflash_sglang.step.accept import Acceptor, draw_and_accept, draws_fused
from dflash_sglang.step.batch_facts import NOTHING_RUNS, most_filters
from dflash_sglang.step.draft.drafter import Draft

VOCABULARY, WIDTH = 6, 3
PLAIN = {"top_k": TOP_K_ALL, "top_p": 1.0, "min_p": 0.0}
GREEDY = {"top_k": 1, "top_p": 0.5, "min_p": 0.3}  # a greedy request's filters change nothing


def batch_of(*params: dict[str, Any], **info: Any) -> Any:
    """A batch as SGLang describes it."""
    top_ks = [one["top_k"] for one in params]
    described = {
        "temperatures": torch.full((len(params), 1), 0.7),
        "top_ks": torch.tensor(top_ks, dtype=torch.int32),
        "top_ps": torch.tensor([one["top_p"] for one in params]),
        "min_ps": torch.tensor([one["min_p"] for one in params]),
        "is_any_greedy": any(top_k <= 1 for top_k in top_ks),
        "is_all_greedy": all(top_k <= 1 for top_k in top_ks),
        "need_top_k_sampling": any(top_k != TOP_K_ALL for top_k in top_ks),
        "need_top_p_sampling": any(one["top_p"] != 1.0 for one in params),
        "need_min_p_sampling": any(one["min_p"] > 0 for one in params),
        "sampling_seed": None,
        "has_custom_logit_processor": False,
        **info,
    }
    return SimpleNamespace(
        reqs=[SimpleNamespace(sampling_params=SimpleNamespace(**one)) for one in params],
        sampling_info=SimpleNamespace(**described),
        seq_lens=torch.full((len(params),), 10),
    )


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept, "runs_triton", lambda _: True)


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (batch_of(PLAIN, PLAIN), True),
        (batch_of(PLAIN, GREEDY), True),
        (batch_of(PLAIN, {**PLAIN, "top_k": 20, "top_p": 0.9}), True),
        (batch_of({**PLAIN, "top_k": 20, "top_p": 0.9}, {**PLAIN, "min_p": 0.1}), True),
        (batch_of(PLAIN, {"top_k": 20, "top_p": 0.9, "min_p": 0.1}), False),
        (batch_of(GREEDY, PLAIN), True),
        (batch_of(PLAIN, sampling_seed=torch.tensor([1])), False),
        (batch_of(PLAIN, has_custom_logit_processor=True), False),
    ],
)
def test_batches_that_one_op_draws_for(batch: Any, expected: bool) -> None:
    assert draws_fused(batch, torch.zeros(1), most_filters(batch.reqs)) is expected


def test_on_a_cpu_sglangs_sampler_draws() -> None:
    assert not draws_fused(batch_of(PLAIN), torch.zeros(1), 0)


def test_a_greedy_neighbour_stays_greedy_and_draws_are_fresh() -> None:
    batch = batch_of(PLAIN, GREEDY)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2 * WIDTH, VOCABULARY, generator=generator)
    drafts = torch.zeros(2, WIDTH, dtype=torch.int64)
    drawn = [
        draw_and_accept(batch, drafts, logits, None, filtered=False).output_ids for _ in range(20)
    ]
    for ids in drawn:
        assert torch.equal(ids[1], logits[WIDTH:].argmax(1))
    assert len({tuple(ids[0].tolist()) for ids in drawn}) > 1


def test_draws_follow_the_temperature() -> None:
    logits = torch.tensor([[0.0, 1.0]])
    batch = batch_of(PLAIN, temperatures=torch.tensor([[0.5]]))
    drafts = torch.zeros(1, 1, dtype=torch.int64)
    draws = [
        int(draw_and_accept(batch, drafts, logits, None, filtered=False).bonus_ids)
        for _ in range(2000)
    ]
    # P(1) = 0.8808 at temperature 0.5, 0.7311 at 1; five standard deviations are 0.036.
    assert abs(sum(draws) / 2000 - 0.8808) < 0.036


@pytest.mark.parametrize(
    ("filters", "kept"),
    [({"top_k": 2}, {3, 5}), ({"top_p": 0.6}, {5}), ({"min_p": 0.2}, {3, 5})],
)
def test_filters_hold_for_the_request_that_has_them(
    filters: dict[str, Any], kept: set[int]
) -> None:
    # Probabilities .6366, .2342, .0862, ...: the second is .37 of the first, the third .14.
    row = torch.tensor([0.0, -2.0, 1.0, 2.0, -3.0, 3.0])
    batch = batch_of({**PLAIN, **filters}, PLAIN, temperatures=torch.ones(2, 1))
    drafts = torch.zeros(2, WIDTH, dtype=torch.int64)
    drawn: list[set[int]] = [set(), set()]
    for _ in range(200):
        logits = row.repeat(2 * WIDTH, 1)
        ids = draw_and_accept(batch, drafts, logits, None, filtered=True).output_ids
        for seen, of_request in zip(drawn, ids, strict=True):
            seen.update(of_request.tolist())
    assert drawn[0] == kept
    assert len(drawn[1]) > 3  # its neighbour draws from all


@pytest.mark.usefixtures("on_cuda")
def test_rank_zero_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks draw from seeds of their own; all must commit the same tokens."""
    decided = torch.tensor([[4, 5, 1]])

    class Sync:
        def enabled(self, site: SpecTpSyncSite) -> bool:
            return site is SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE

        def sync(self, site: SpecTpSyncSite, values: torch.Tensor) -> torch.Tensor:
            return values.copy_(decided)

    monkeypatch.setattr(Acceptor, "_update_thresholds", lambda _: None)
    monkeypatch.setattr(accept, "get_spec", lambda: None)
    running: Any = SimpleNamespace(facts=lambda batch: NOTHING_RUNS)  # no filters
    acceptor = Acceptor(Rule.MATCH, None, running, Sync())  # type: ignore[arg-type]
    batch, draft = batch_of(PLAIN), Draft(torch.tensor([[0, 4, 2]]), None)
    logits = torch.zeros(WIDTH, VOCABULARY)
    got = acceptor.accept(batch, draft, logits, torch.arange(WIDTH)[None], None)
    expected = accept_match(draft.ids, decided, batch.seq_lens)
    assert all(map(torch.equal, got, expected))
    assert got.accept_len.tolist() == [1]


def test_inexact_thresholds_are_announced_at_the_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spec = SimpleNamespace(
        speculative_accept_threshold_single=1.0, speculative_accept_threshold_acc=0.4
    )
    monkeypatch.setattr(accept, "get_spec", lambda: spec)
    Acceptor(Rule.MATCH, None, None, None)  # type: ignore[arg-type]
    assert caplog.text.count("not exact, another distribution is served") == 1
