"""Which tokens of a verified block are committed, by the rule that the server was started with."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from dflash_kernels.accept_filtered import accept_filtered
from dflash_kernels.accept_match import accept_match
from dflash_kernels.accept_sampled import accept_sampled
from dflash_kernels.dispatch import runs_triton
from dflash_kernels.types import Acceptance, Block, Filters
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.spec_tp_sync import SpecTpSync, SpecTpSyncSite
from torch import Tensor

from dflash_sglang.core.accept import REJECTIONS, Rule, Thresholds, by_row, relaxed
from dflash_sglang.step.batch_facts import RunningBatch
from dflash_sglang.step.draft.drafter import Draft
from dflash_sglang.step.verifier_sampling import VerifierSampler

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

logger = logging.getLogger(__name__)

SEED_END = 2**63 - 1


def chosen_rule() -> Rule:
    """The rule chosen by SGLang's flags."""
    if get_spec().speculative_use_block_verification:
        return Rule.BLOCK
    if get_spec().speculative_use_rejection_sampling:
        return Rule.TOKEN_WISE
    return Rule.MATCH


class Acceptor:
    """Accepts drafts. Greedy requests match, whatever the rule of the others."""

    def __init__(
        self, rule: Rule, sampler: VerifierSampler, running: RunningBatch, tp_sync: SpecTpSync
    ) -> None:
        self._rule = rule
        self._sampler = sampler
        self._running = running
        self._tp_sync = tp_sync
        self._thresholds = Thresholds(1.0, 1.0)
        self._update_thresholds()  # logs inexact ones before the first request

    def draft_uniforms(self, batch: ScheduleBatch, block: Block) -> Tensor | None:
        """Random numbers to draw the drafts by, where the rule wants drafts that are drawn.

        Returns:
            [bs, width - 1] float32 in [0, 1), alike on all ranks; None for most likely drafts.
        """
        if self._rule is Rule.MATCH or batch.sampling_info.is_all_greedy:
            return None
        return self._uniforms(block.ids.shape[0], block.ids.shape[1] - 1, block.ids.device)

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
        matched = accept_match(draft.ids, verifier_ids, batch.seq_lens, limit=limit)
        probs = self._sampler.probs(logits, batch, draft.ids.shape)
        bs, width = draft.ids.shape
        uniforms = self._uniforms(bs, width, logits.device)
        rejected = REJECTIONS[self._rule](
            draft.ids, draft.proposal, probs, uniforms, batch.seq_lens, limit=limit
        )
        return by_row(greedy, matched, rejected)

    def next_token(self, batch: ScheduleBatch, anchor: Block, logits: Tensor) -> Acceptance:
        """The verifier's token behind each anchor, where nothing was drafted.

        Args:
            batch: as in `accept`.
            anchor: a block of width 1.
            logits: [bs, vocab] float32, adjusted; kept when the batch wants logprobs.
        """
        return self._match(batch, anchor.ids, logits, anchor.positions, None)

    def _match(
        self,
        batch: ScheduleBatch,
        draft_ids: Tensor,
        logits: Tensor,
        positions: Tensor,
        limit: Tensor | None,
    ) -> Acceptance:
        """Accept the drafts that equal the verifier's tokens."""
        all_greedy = batch.sampling_info.is_all_greedy
        self._update_thresholds()
        relax = not (self._thresholds.exact or all_greedy)
        if not relax and not all_greedy:
            most_filters = self._running.facts(batch).most_filters
            if draws_fused(batch, logits, most_filters):
                filtered = most_filters > 0
                return self._draw_and_match(batch, draft_ids, logits, limit, filtered=filtered)
        # Before the draw: the sampler overwrites the logits.
        probs = self._sampler.probs(logits, batch, draft_ids.shape) if relax else None
        verifier_ids = self._sampler.choose(logits, batch, positions)
        # Ranks draw from their own generators: rank 0 decides.
        self._tp_sync.sync(SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE, verifier_ids)
        extra = None
        if probs is not None:
            uniforms = self._uniforms(draft_ids.shape[0], draft_ids.shape[1] - 1, logits.device)
            extra = relaxed(draft_ids, verifier_ids, probs, uniforms, self._thresholds)
            extra &= (batch.sampling_info.top_ks > 1)[:, None]
        return accept_match(
            draft_ids, verifier_ids, batch.seq_lens, limit=limit, extra_accept=extra
        )

    def _draw_and_match(
        self,
        batch: ScheduleBatch,
        draft_ids: Tensor,
        logits: Tensor,
        limit: Tensor | None,
        *,
        filtered: bool,
    ) -> Acceptance:
        """The same in one op."""
        accepted = draw_and_accept(batch, draft_ids, logits, limit, filtered=filtered)
        if not self._tp_sync.enabled(SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE):
            return accepted
        # Ranks have drawn seeds of their own: rank 0 decides.
        verifier_ids = self._tp_sync.sync(SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE, accepted.output_ids)
        return accept_match(draft_ids, verifier_ids, batch.seq_lens, limit=limit)

    def _uniforms(self, bs: int, width: int, device: torch.device | str) -> Tensor:
        """Random numbers that all ranks share, [bs, width] float32 in [0, 1)."""
        values = torch.rand(bs, width, device=device)
        return self._tp_sync.sync(SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE, values)

    def _update_thresholds(self) -> None:
        """SGLang's /set_internal_state can change the thresholds."""
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


def draws_fused(batch: ScheduleBatch, logits: Tensor, most_filters: int) -> bool:
    """Whether one op draws for all requests of a batch and accepts.

    The others are drawn by SGLang's ordinary sampler: requests with custom logit processors, whose
    logits may be anything; requests with all of top-k, top-p and min-p, of which SGLang takes
    top-p of what top-k left, and the op both of the whole; their neighbours; and all under
    --enable-deterministic-inference. There a seed's text must be the one without speculation, draw
    for draw, and SGLang draws from rounded probabilities, the op from the logits themselves: one
    draw in a million would be another.

    Args:
        batch: the decode batch.
        logits: [bs * width, vocab].
        most_filters: of top-k, top-p and min-p, those that a sampled request has at most.
    """
    info = batch.sampling_info
    if not runs_triton(logits) or info.sampling_seed is not None:
        return False
    return not info.has_custom_logit_processor and most_filters < 3


def draw_and_accept(
    batch: ScheduleBatch,
    draft_ids: Tensor,
    logits: Tensor,
    limit: Tensor | None,
    *,
    filtered: bool,
) -> Acceptance:
    """Sample and match: see `dflash_kernels.accept_sampled` and `accept_filtered`.

    Args:
        batch: the decode batch, for which `draws_fused` holds.
        draft_ids: [bs, width] int64, column 0 the anchor.
        logits: [bs * width, vocab], adjusted; kept.
        limit: [bs] int32, most drafts that each request may accept; None for all.
        filtered: whether a sampled request has top-k, top-p or min-p.
    """
    info = batch.sampling_info
    temperatures = info.temperatures.view(-1)
    if info.is_any_greedy:
        temperatures = temperatures.masked_fill(info.top_ks <= 1, 0.0)
    # Fresh numbers every step: a request without a seed promises no text.
    seeds = torch.randint(SEED_END, (len(draft_ids),), device=logits.device)
    given = (logits, draft_ids, batch.seq_lens, temperatures, seeds)
    if not filtered:
        return accept_sampled(*given, limit=limit)
    filters = Filters(info.top_ks, info.top_ps, info.min_ps)
    return accept_filtered(*given, filters, limit=limit)
