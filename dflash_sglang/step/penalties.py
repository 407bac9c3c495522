"""Penalties of the requests of a batch, counted on the device.

SGLang's penalizers are fed from the host, which under overlap lags a whole accepted run. Here the
counts of a request follow its committed tokens on the device, and are rebuilt from its output
whenever it is prefilled, so that a retracted request resumes where it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from dflash_kernels.types import Acceptance
from sglang.srt.utils.common import async_h2d
from torch import Tensor

from dflash_sglang.core.penalties import (
    PenaltyParams,
    additive_penalties,
    apply_penalties,
    count_committed,
    counts_along,
    scaling_penalties,
)
from dflash_sglang.step.end_of_request import stop_ids

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch


class PenalisedRows(NamedTuple):
    """The requests of a batch that have penalties."""

    reqs: list[Req]
    rows: Tensor  # [n] int64, their rows in the batch
    counts: Tensor  # [n, vocab] int32, occurrences in their output, the anchor included
    prompt_lens: Tensor  # [n] int64
    params: PenaltyParams


class Penalties:
    """Output-token counts of every running request that has a penalty."""

    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        self._vocab_size = vocab_size
        self._device = device
        # One [vocab] int32 vector a request, dropped with the request.
        self._counts: WeakKeyDictionary[Req, Tensor] = WeakKeyDictionary()

    def rows_of(self, batch: ScheduleBatch) -> PenalisedRows | None:
        """Gather the batch's penalised requests; None when there are none."""
        chosen = [(row, req) for row, req in enumerate(batch.reqs) if _is_penalised(req)]
        if not chosen:
            return None
        reqs = [req for _, req in chosen]
        return PenalisedRows(
            reqs=reqs,
            rows=self._to_device([row for row, _ in chosen], torch.int64),
            counts=torch.stack([self._counts[req] for req in reqs]),
            prompt_lens=self._to_device([len(req.origin_input_ids) for req in reqs], torch.int64),
            params=self._params(reqs),
        )

    def penalise(
        self, logits: Tensor, penalised: PenalisedRows, batch: ScheduleBatch, draft_ids: Tensor
    ) -> None:
        """Apply the penalties along the drafted blocks, in place.

        Args:
            logits: [bs, width, vocab] float32.
            penalised: the rows to change.
            batch: `seq_lens` are the committed lengths, without the anchor.
            draft_ids: [bs, width] int64.
        """
        rows = penalised.rows
        position = torch.arange(draft_ids.shape[1], device=draft_ids.device)
        # The anchor and the drafts before a position are output as well.
        output_lens = (batch.seq_lens[rows] - penalised.prompt_lens + 1)[:, None] + position
        logits[rows] = apply_penalties(
            logits[rows],
            counts_along(penalised.counts, draft_ids[rows]),
            output_lens,
            penalised.params,
        )

    def commit(self, penalised: PenalisedRows, accepted: Acceptance) -> None:
        """Count what a verify committed."""
        rows = penalised.rows
        self._store(
            penalised.reqs,
            count_committed(penalised.counts, accepted.output_ids[rows], accepted.commit_len[rows]),
        )

    def prepare_prefill(self, batch: ScheduleBatch) -> PenalisedRows | None:
        """Set the counts of prefilled requests and hand the sampler the right penalties.

        SGLang's own are those of a fresh request, which is wrong for one that resumes after a
        retraction and for the decode rows of a mixed batch.
        """
        info = batch.sampling_info
        if info.acc_additive_penalties is None:
            return None
        decoding = {id(req) for req in batch.decoding_reqs or ()}
        for req in batch.reqs:
            if _is_penalised(req) and id(req) not in decoding:
                # The host has all output of a request that is not running.
                self._counts[req] = self._count(req.output_ids)
        penalised = self.rows_of(batch)
        if penalised is None:
            return None
        rows, counts = penalised.rows, penalised.counts[:, None, :]
        output_lens = (batch.seq_lens[rows] - penalised.prompt_lens)[:, None]
        additive = additive_penalties(counts, output_lens, penalised.params)
        info.acc_additive_penalties = torch.zeros_like(info.acc_additive_penalties)
        info.acc_additive_penalties[rows] = additive[:, 0]
        info.acc_scaling_penalties = torch.ones_like(info.acc_additive_penalties)
        info.acc_scaling_penalties[rows] = scaling_penalties(counts, penalised.params)[:, 0]
        return penalised

    def commit_prefill(self, penalised: PenalisedRows, next_token_ids: Tensor) -> None:
        """Count the token that a prefill sampled; for an unfinished chunk the next one resets."""
        output_ids = next_token_ids[penalised.rows].to(torch.int64)[:, None]
        commit_len = torch.ones(len(penalised.reqs), dtype=torch.int32, device=output_ids.device)
        self._store(penalised.reqs, count_committed(penalised.counts, output_ids, commit_len))

    def _store(self, reqs: list[Req], counts: Tensor) -> None:
        for req, vector in zip(reqs, counts, strict=True):
            self._counts[req] = vector

    def _count(self, output_ids: list[int]) -> Tensor:
        ids = self._to_device(list(output_ids), torch.int64)
        counts = torch.zeros(self._vocab_size, dtype=torch.int32, device=self._device)
        return counts.scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))

    def _params(self, reqs: list[Req]) -> PenaltyParams:
        chosen = [req.sampling_params for req in reqs]
        held = [sorted(stop_ids(req)) for req in reqs]
        width = max(map(len, held))
        padded = [ids + [self._vocab_size] * (width - len(ids)) for ids in held]
        return PenaltyParams(
            frequency=self._to_device([p.frequency_penalty for p in chosen], torch.float32),
            presence=self._to_device([p.presence_penalty for p in chosen], torch.float32),
            repetition=self._to_device([p.repetition_penalty for p in chosen], torch.float32),
            min_new_tokens=self._to_device([p.min_new_tokens for p in chosen], torch.int64),
            stop_ids=self._to_device(padded, torch.int64).view(len(reqs), width),
        )

    def _to_device(self, values: list[Any], dtype: torch.dtype) -> Tensor:
        return async_h2d(values, dtype=dtype, device=self._device)


def _is_penalised(req: Req) -> bool:
    params = req.sampling_params
    return bool(
        params.frequency_penalty != 0
        or params.presence_penalty != 0
        or params.repetition_penalty != 1
        or params.min_new_tokens > 0
    )
