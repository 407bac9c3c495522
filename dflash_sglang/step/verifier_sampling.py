"""Which token the verifier itself would produce at every position of a drafted block."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from torch import Tensor

from dflash_sglang.core.distribution import Filters, verifier_probs
from dflash_sglang.step.logit_processors import apply_processors
from dflash_sglang.step.penalties import PenalisedRows, Penalties

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar_backend import GrammarMask
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


class VerifierSampler:
    """Applies a request's rules to the verifier's logits and picks a token at each position.

    Sampled rows are drawn by SGLang's ordinary sampler, so temperature, top-k, top-p, min-p, seeds
    and their order are whatever they are without speculation.
    """

    def __init__(self, model_runner: ModelRunner, penalties: Penalties) -> None:
        self._sampler = model_runner.sampler
        self._penalties = penalties

    def adjust(
        self,
        logits: Tensor,
        batch: ScheduleBatch,
        draft_ids: Tensor,
        penalised: PenalisedRows | None,
        grammar_mask: GrammarMask | None,
    ) -> None:
        """Penalties, grammar mask, logit bias and custom processors, in SGLang's order, in place.

        Args:
            logits: [bs * width, vocab] float32.
            batch: the decode batch.
            draft_ids: [bs, width] int64; a position's rules may depend on the drafts before it.
            penalised: the rows with penalties.
            grammar_mask: tokens the grammar allows, a row of logits each.
        """
        by_request = logits.view(*draft_ids.shape, -1)
        if penalised is not None:
            self._penalties.penalise(by_request, penalised, batch, draft_ids)
        if grammar_mask is not None:
            grammar_mask.apply(logits)
        if batch.sampling_info.logit_bias is not None:
            by_request.add_(batch.sampling_info.logit_bias[:, None, :])
        if batch.sampling_info.has_custom_logit_processor:
            apply_processors(by_request, batch, draft_ids[:, 0])

    def probs(self, logits: Tensor, batch: ScheduleBatch, shape: torch.Size) -> Tensor:
        """The distributions that `choose` draws from.

        Args:
            logits: [bs * width, vocab] float32, adjusted; kept.
            batch: the decode batch.
            shape: (bs, width).

        Returns:
            [bs, width, vocab] float32.
        """
        info = _per_position(batch.sampling_info, shape[1])
        filters = Filters(
            temperatures=info.temperatures,
            top_ks=info.top_ks,
            top_ps=info.top_ps,
            min_ps=info.min_ps,
            any_set=(
                info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling
            ),
        )
        return verifier_probs(logits, filters).view(*shape, -1)

    def choose(self, logits: Tensor, batch: ScheduleBatch, positions: Tensor) -> Tensor:
        """The verifier's token at each position.

        Args:
            logits: [bs * width, vocab] float32, adjusted; kept when the batch wants logprobs.
            batch: the decode batch.
            positions: [bs, width] int64, of the tokens that the logits follow; they key the seeds.

        Returns:
            [bs, width] int64.
        """
        info = batch.sampling_info
        if info.is_all_greedy:
            return logits.argmax(dim=-1).view(positions.shape)
        # The ordinary sampler overwrites what it is given.
        given = logits.clone() if batch.return_logprob else logits
        ids = self._sampler(
            LogitsProcessorOutput(next_token_logits=given),
            _per_position(info, positions.shape[1]),
            False,  # logprobs are computed for the committed tokens only
            [],
            [],
            positions.view(-1),
        )
        return ids.to(torch.int64).view(positions.shape)


def _per_position(info: SamplingBatchInfo, width: int) -> SamplingBatchInfo:
    """The sampling parameters of every row of logits; what has been applied already is left out."""

    def repeat(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.repeat_interleave(width, dim=0)

    return dataclasses.replace(
        info,
        temperatures=repeat(info.temperatures),
        top_ps=repeat(info.top_ps),
        top_ks=repeat(info.top_ks),
        min_ps=repeat(info.min_ps),
        sampling_seed=repeat(info.sampling_seed),
        grammars=None,
        grammar_mask=None,
        logit_bias=None,
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        has_custom_logit_processor=False,
        custom_logit_processor=None,
        custom_params=None,
    )
