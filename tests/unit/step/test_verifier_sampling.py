"""Custom logit processors, and seeded draws that do not depend on the rest of the batch."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dflash_kernels.accept_sampled.hashing import murmur_hash32
from sglang.srt.layers import sampler
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from torch import Tensor

from dflash_sglang.step.verifier_sampling import (
    complete_mixed_outputs,
    complete_outputs,
    draw_unfiltered_alone,
)
from tests.support.requests import request_with

# ---- processors read the whole output so far, also where the host lags a step --------------------


def processed_request(output: Sequence[int], processor: str | None = "{}") -> Any:
    return request_with(
        prompt_ids=[1, 2, 3], custom_logit_processor=processor, output_ids=array("q", output)
    )


def test_a_missing_last_token_is_there_while_processors_run() -> None:
    lagging, current, other = (
        processed_request([7]),
        processed_request([7, 8]),
        processed_request([7], None),
    )
    reqs = [other, lagging, current]
    with complete_outputs(reqs, torch.tensor([9, 8, 8]), torch.tensor([5, 5, 5])):
        assert [list(req.output_ids) for req in reqs] == [[7], [7, 8], [7, 8]]
    assert [list(req.output_ids) for req in reqs] == [[7], [7], [7, 8]]


def test_decode_rows_of_a_mixed_batch_come_last() -> None:
    prefilled, decoding = processed_request([]), processed_request([7])
    batch: Any = SimpleNamespace(
        reqs=[prefilled, decoding],
        decoding_reqs=[decoding],
        sampling_info=SimpleNamespace(has_custom_logit_processor=True),
        input_ids=torch.tensor([1, 2, 3, 8]),
        seq_lens=torch.tensor([3, 5]),  # prompt, and prompt with two tokens of output
    )
    with complete_mixed_outputs(batch):
        assert list(prefilled.output_ids) == []
        assert list(decoding.output_ids) == [7, 8]
    assert list(decoding.output_ids) == [7]


def test_a_prefill_without_decode_rows_is_left_alone() -> None:
    batch: Any = SimpleNamespace(
        reqs=[processed_request([])],
        decoding_reqs=None,
        sampling_info=SimpleNamespace(has_custom_logit_processor=True),
    )
    with complete_mixed_outputs(batch):
        assert list(batch.reqs[0].output_ids) == []


# ---- seeds -------------------------------------------------------------------------------------

REQUESTS, VOCAB = 64, 50


def draw(rows: slice, top_k: int, seeded: bool, *, hooked: bool) -> list[int]:
    """Draw some of 64 requests by SGLang's sampler; every second one filters by `top_k`."""
    probs = torch.rand(REQUESTS, VOCAB, generator=torch.Generator().manual_seed(0))
    probs = (probs / probs.sum(1, keepdim=True))[rows]
    top_ks = torch.tensor([TOP_K_ALL, top_k] * (REQUESTS // 2), dtype=torch.int32)[rows]
    seeds, positions = torch.arange(100, 100 + REQUESTS)[rows], torch.arange(REQUESTS)[rows]
    neutral = torch.ones(len(top_ks)), torch.zeros(len(top_ks))
    given = (probs, top_ks, *neutral, False, seeds if seeded else None, positions)
    torch.manual_seed(0)
    original = sampler.top_k_top_p_min_p_sampling_from_probs_torch
    ids: Tensor = draw_unfiltered_alone(original, *given) if hooked else original(*given)
    return ids.tolist()


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "murmur_hash32", murmur_hash32)


@pytest.mark.usefixtures("without_triton")
def test_an_unfiltered_request_draws_the_same_beside_filtering_ones() -> None:
    unfiltered = slice(0, None, 2)
    probs = torch.rand(REQUESTS, VOCAB, generator=torch.Generator().manual_seed(0))
    alone = sampler.sampling_from_probs_torch(
        (probs / probs.sum(1, keepdim=True))[unfiltered],
        sampling_seed=torch.arange(100, 100 + REQUESTS)[unfiltered],
        positions=torch.arange(REQUESTS)[unfiltered],
    ).tolist()
    assert draw(slice(None), 5, True, hooked=True)[unfiltered] == alone
    assert draw(slice(None), 5, True, hooked=False)[unfiltered] != alone  # what the hook mends


@pytest.mark.usefixtures("without_triton")
def test_filtering_requests_and_unseeded_ones_are_drawn_by_sglang() -> None:
    everything, filtering = slice(None), slice(1, None, 2)
    theirs = draw(everything, 5, True, hooked=False)
    assert draw(everything, 5, True, hooked=True)[filtering] == theirs[filtering]
    assert draw(everything, 5, False, hooked=True) == draw(everything, 5, False, hooked=False)
