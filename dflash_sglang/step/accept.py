"""Which tokens of a verified block are committed, by the rule that the server was started with."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from dflash_kernels.types import Acceptance
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.spec_tp_sync import SpecTpSync, SpecTpSyncSite
from torch import Tensor

from dflash_sglang.core import accept
from dflash_sglang.core.accept import Rule, Thresholds
from dflash_sglang.step.draft import Draft
from dflash_sglang.step.fused_draw import draw_and_accept, draws_fused
from dflash_sglang.step.verifier_sampling import VerifierSampler

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

logger = logging.getLogger(__name__)


def chosen_rule() -> Rule:
    """The rule that SGLang's flags ask for."""
    if get_spec().speculative_use_block_verification:
        return Rule.BLOCK
    if get_spec().speculative_use_rejection_sampling:
        return Rule.TOKEN_WISE
    return Rule.MATCH


class Acceptor:
    """Accepts drafts. Greedy requests match, whatever the rule of the others."""

    def __init__(self, rule: Rule, sampler: VerifierSampler, tp_sync: SpecTpSync) -> None:
        self._rule = rule
        self._sampler = sampler
        self._tp_sync = tp_sync
        self._thresholds = Thresholds(1.0, 1.0)
        self._current_thresholds()  # announces inexact ones before the first request

    def samples_drafts(self, batch: ScheduleBatch) -> bool:
        """Whether the batch's drafts are drawn instead of the most likely ones."""
        return self._rule is not Rule.MATCH and not batch.sampling_info.is_all_greedy

    def uniforms(self, bs: int, width: int, device: torch.device | str) -> Tensor:
        """Random numbers that all ranks share, [bs, width] float32 in [0, 1)."""
        values = torch.rand(bs, width, device=device)
        return self._tp_sync.sync(SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE, values)

    def accept(
        self,
        batch: ScheduleBatch,
        draft: Draft,
        logits: Tensor,
        positions: Tensor,
        limit: Tensor | None,
    ) -> Acceptance:
        """Accept a prefix of every block.

        Args:
            batch: the decode batch; `seq_lens` are the committed lengths.
            draft: the block, and what sampled drafts were drawn from.
            logits: [bs * width, vocab] float32, adjusted; kept when the batch wants logprobs.
            positions: [bs, width] int64.
            limit: [bs] int32, most drafts that each request may accept; None for all.
        """
        if draft.proposal is None:
            return self._match(batch, draft.ids, logits, positions, limit)
        greedy = batch.sampling_info.top_ks <= 1
        verifier_ids = logits.argmax(dim=-1).view(draft.ids.shape)  # of the greedy requests
        matched = accept.match(draft.ids, verifier_ids, batch.seq_lens, limit=limit)
        probs = self._sampler.probs(logits, batch, draft.ids.shape)
        bs, width = draft.ids.shape
        uniforms = self.uniforms(bs, width, logits.device)
        rejected = accept.REJECTIONS[self._rule](
            draft.ids,
            draft.proposal,
            probs,
            uniforms,
            batch.seq_lens,
            limit=limit,
        )
        return accept.by_row(greedy, matched, rejected)

    def _match(
        self,
        batch: ScheduleBatch,
        draft_ids: Tensor,
        logits: Tensor,
        positions: Tensor,
        limit: Tensor | None,
    ) -> Acceptance:
        thresholds = self._current_thresholds()
        relax = not (thresholds.exact or batch.sampling_info.is_all_greedy)
        if not relax and not batch.sampling_info.is_all_greedy and draws_fused(batch, logits):
            return self._draw(batch, draft_ids, logits, limit)
        # Before the draw: the sampler overwrites the logits.
        probs = self._sampler.probs(logits, batch, draft_ids.shape) if relax else None
        verifier_ids = self._sampler.choose(logits, batch, positions)
        # Ranks draw from their own generators: rank 0 decides.
        self._tp_sync.sync(SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE, verifier_ids)
        extra_accept = None
        if probs is not None:
            uniforms = self.uniforms(draft_ids.shape[0], draft_ids.shape[1] - 1, logits.device)
            extra_accept = accept.relaxed(draft_ids, verifier_ids, probs, uniforms, thresholds)
            extra_accept &= (batch.sampling_info.top_ks > 1)[:, None]
        return accept.match(
            draft_ids, verifier_ids, batch.seq_lens, limit=limit, extra_accept=extra_accept
        )

    def _draw(
        self, batch: ScheduleBatch, draft_ids: Tensor, logits: Tensor, limit: Tensor | None
    ) -> Acceptance:
        accepted = draw_and_accept(batch, draft_ids, logits, limit)
        if not self._tp_sync.enabled(SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE):
            return accepted
        # As below: ranks have drawn seeds of their own, rank 0 decides.
        verifier_ids = self._tp_sync.sync(SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE, accepted.output_ids)
        return accept.match(draft_ids, verifier_ids, batch.seq_lens, limit=limit)

    def _current_thresholds(self) -> Thresholds:
        """The thresholds in force: SGLang's /set_internal_state can change them."""
        spec = get_spec()
        thresholds = Thresholds(
            spec.speculative_accept_threshold_single, spec.speculative_accept_threshold_acc
        )
        if thresholds != self._thresholds:
            self._thresholds = thresholds
            logger.warning(
                "DFLASH accepts drafts of sampled requests by %s: %s.",
                thresholds,
                "exact" if thresholds.exact else "not exact, another distribution is served",
            )
        return thresholds
