"""Attention against its definition: modes, ragged lengths, pages, windows, heads, padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash_sglang.cpu.attention import attend as attention
from dflash_sglang.cpu.attention.attend import FULL_CONTEXT, attend, plan_attention
from tests.unit.cpu.attention.batches import Batch, attend_by_definition, make_batch

SCALE = 0.25
# float32 sums over at most a few hundred terms of size one against float64
TOLERANCE: dict[str, Any] = {"atol": 2e-5, "rtol": 1e-4}

MODES = {
    "decode": ([1, 1, 1], [5, 9, 2], True),
    "decode of one": ([1], [7], True),
    "first token": ([1], [1], True),
    "verify": ([4, 4, 4], [4, 30, 11], True),
    "verify of one": ([16], [40], True),
    "draft block": ([4, 4, 4], [4, 30, 11], False),
    "draft block of one": ([8], [19], False),
    "prefill": ([3, 7, 7], [3, 7, 7], True),
    "prefill after a prefix hit": ([3, 7, 1], [12, 7, 33], True),
    "mixed prefill and decode": ([9, 1, 1, 1], [9, 4, 60, 5], True),
    "a request without a query": ([2, 0, 3], [6, 8, 3], True),
}


def planned(batch: Batch) -> list[attention.AttentionGroup]:
    row_elements = batch.kv.shape[2] * batch.kv.shape[3]
    return plan_attention(batch.req_to_token, batch.rows, batch.q_lens, batch.kv_lens, row_elements)


def check(batch: Batch, causal: bool, window_left: int = FULL_CONTEXT) -> None:
    out = attend(planned(batch), batch.query, batch.kv, SCALE, causal, window_left)
    assert out.isfinite().all()  # unused and padding slots hold NaN
    expected = attend_by_definition(batch, SCALE, causal, window_left)
    torch.testing.assert_close(out.double(), expected, **TOLERANCE)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_every_mode_and_page_size(mode: str, page_size: int) -> None:
    q_lens, kv_lens, causal = MODES[mode]
    check(make_batch(q_lens, kv_lens, page_size=page_size), causal)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("window_left", [1, 3, 8, 200])
def test_window_keeps_exactly_that_many_positions_before_each_query(
    mode: str, window_left: int
) -> None:
    """Catches a window counted per request instead of per position, and one off by one."""
    q_lens, kv_lens, causal = MODES[mode]
    check(make_batch(q_lens, kv_lens), causal, window_left)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (8, 1)])
def test_grouped_heads(heads: int, kv_heads: int) -> None:
    check(make_batch([5, 5], [9, 31], heads=heads, kv_heads=kv_heads), causal=True)


def test_layers_with_and_without_a_window_share_one_plan() -> None:
    """A cached mask of one layer must not serve a layer of another kind."""
    batch = make_batch([4, 4], [20, 9])
    plan = planned(batch)
    for causal, window_left in [(True, -1), (True, 3), (False, -1), (False, 3), (True, -1)]:
        out = attend(plan, batch.query, batch.kv, SCALE, causal, window_left)
        expected = attend_by_definition(batch, SCALE, causal, window_left)
        torch.testing.assert_close(out.double(), expected, **TOLERANCE)


def test_idle_batch_has_no_groups() -> None:
    batch = make_batch([], [])
    assert planned(batch) == []
    out = attend([], torch.empty(0, 4, 16), batch.kv, SCALE)
    assert out.shape == (0, 64)


@pytest.mark.parametrize("kv_lens", [[600, 2, 3, 4], [600, 580, 5, 3], [300, 2]])
def test_very_ragged_contexts_are_cut_and_stay_exact(
    kv_lens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "SPLIT_ELEMENTS", 1000)
    batch = make_batch([2] * len(kv_lens), kv_lens)
    assert len(planned(batch)) > 1
    check(batch, causal=True)


def test_even_contexts_are_one_call() -> None:
    assert len(planned(make_batch([16] * 8, [100, 104, 99, 120, 100, 101, 102, 90]))) == 1


@pytest.mark.parametrize("causal", [True, False])
def test_a_request_does_not_depend_on_its_neighbours(causal: bool) -> None:
    """Float32 rounding apart: padding and grouping only add weights that are exactly zero."""
    batch = make_batch([4] * 6, [4, 30, 11, 64, 5, 17])
    together = torch.split(attend(planned(batch), batch.query, batch.kv, SCALE, causal), 4)
    for i, kv_len in enumerate(batch.kv_lens):
        alone = batch._replace(
            rows=batch.rows[i : i + 1],
            q_lens=[4],
            kv_lens=[kv_len],
            query=batch.query[4 * i : 4 * i + 4],
        )
        out = attend(planned(alone), alone.query, alone.kv, SCALE, causal)
        torch.testing.assert_close(together[i], out, atol=1e-6, rtol=1e-6)


def test_a_neighbours_nan_stays_with_the_neighbour() -> None:
    batch = make_batch([2, 2, 2], [3, 40, 8])
    broken = batch.req_to_token[batch.rows[1], :40].long()
    batch.kv[:, broken] = float("nan")
    out = attend(planned(batch), batch.query, batch.kv, SCALE, causal=False)
    assert out[2:4].isnan().all()
    assert out[[0, 1, 4, 5]].isfinite().all()


def test_bfloat16_stays_bfloat16() -> None:
    batch = make_batch([4, 4], [20, 9])
    low = attend(planned(batch), batch.query.bfloat16(), batch.kv.bfloat16(), SCALE)
    expected = attend_by_definition(batch, SCALE, causal=True, window_left=FULL_CONTEXT)
    assert low.dtype == torch.bfloat16
    # eight bits of mantissa in the inputs and in the result
    torch.testing.assert_close(low.double(), expected, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_keys_and_values_may_be_kept_in_a_narrower_dtype(dtype: torch.dtype) -> None:
    """A drafter's, by --speculative-draft-kv-cache-dtype; exact on the values that are kept."""
    q_lens, kv_lens, causal = MODES["draft block"]
    batch = make_batch(q_lens, kv_lens)
    kept = batch.kv.to(dtype)
    out = attend(planned(batch), batch.query, kept, SCALE, causal)
    assert out.dtype == batch.query.dtype
    expected = attend_by_definition(batch._replace(kv=kept.float()), SCALE, causal, FULL_CONTEXT)
    torch.testing.assert_close(out.double(), expected, **TOLERANCE)
