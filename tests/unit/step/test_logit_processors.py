"""Custom logit processors see the whole output so far, also where the host lags a step."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from dflash_sglang.step.logit_processors import complete_mixed_outputs, complete_outputs


def request_with(output: Sequence[int], processor: str | None = "{}") -> Any:
    return SimpleNamespace(
        origin_input_ids=[1, 2, 3], output_ids=array("q", output), custom_logit_processor=processor
    )


def test_a_missing_last_token_is_there_while_processors_run() -> None:
    lagging, current, other = request_with([7]), request_with([7, 8]), request_with([7], None)
    reqs = [other, lagging, current]
    with complete_outputs(reqs, torch.tensor([9, 8, 8]), torch.tensor([5, 5, 5])):
        assert [list(req.output_ids) for req in reqs] == [[7], [7, 8], [7, 8]]
    assert [list(req.output_ids) for req in reqs] == [[7], [7], [7, 8]]


def test_decode_rows_of_a_mixed_batch_come_last() -> None:
    prefilled, decoding = request_with([]), request_with([7])
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
        reqs=[request_with([])],
        decoding_reqs=None,
        sampling_info=SimpleNamespace(has_custom_logit_processor=True),
    )
    with complete_mixed_outputs(batch):
        assert list(batch.reqs[0].output_ids) == []
