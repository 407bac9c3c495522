"""Custom logit processors, which may read what their request has produced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.sampler import apply_custom_logit_processor
from torch import Tensor

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch


def apply_processors(logits: Tensor, batch: ScheduleBatch, anchor_ids: Tensor) -> None:
    """Run the batch's processors on the first position of every block, in place.

    Only that position is committed for their requests (see `DraftLimits`), so a processor is called
    once per token, with the output before it.

    Args:
        logits: [bs, width, vocab] float32.
        batch: the decode batch.
        anchor_ids: [bs] int64, the last committed token of each request.
    """
    with complete_outputs(batch.reqs, anchor_ids, batch.seq_lens + 1):
        apply_custom_logit_processor(logits[:, 0], batch.sampling_info)


@contextmanager
def complete_mixed_outputs(batch: ScheduleBatch) -> Iterator[None]:
    """Around a prefill, whose decode rows go through the ordinary sampler: see below.

    Args:
        batch: an extend batch; the decode rows of a mixed one come last, a token each.
    """
    decoding = len(batch.decoding_reqs or ())
    if decoding == 0 or not batch.sampling_info.has_custom_logit_processor:
        yield
        return
    last = slice(-decoding, None)
    with complete_outputs(batch.reqs[last], batch.input_ids[last], batch.seq_lens[last]):
        yield


@contextmanager
def complete_outputs(reqs: Sequence[Req], last_ids: Tensor, total_lens: Tensor) -> Iterator[None]:
    """Let `Req.output_ids` hold everything committed while processors run.

    Under overlap the host learns of a token one step late. Requests with a processor commit one
    token a step, so at most the last one is missing.

    Args:
        reqs: running requests.
        last_ids: [n] int64, the last committed token of each request.
        total_lens: [n] int64, tokens of prompt and output, that one included.
    """
    rows = [row for row, req in enumerate(reqs) if req.custom_logit_processor is not None]
    known = torch.stack([last_ids, total_lens])[:, rows].tolist()  # waits for the device
    behind = [
        (reqs[row], token)
        for row, token, total in zip(rows, *known, strict=True)
        if len(reqs[row].origin_input_ids) + len(reqs[row].output_ids) == total - 1
    ]
    for req, token in behind:
        req.output_ids.append(token)
    yield
    for req, _ in behind:
        req.output_ids.pop()
