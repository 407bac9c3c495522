"""The verifier's own token at every position of a block, by the rules of its request."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import apply_custom_logit_processor, sampling_from_probs_torch
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from torch import Tensor

from dflash_sglang.core.distribution import Filters, verifier_probs
from dflash_sglang.step.penalties import PenalisedRows, Penalties

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar_backend import GrammarMask
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
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


def apply_processors(logits: Tensor, batch: ScheduleBatch, anchor_ids: Tensor) -> None:
    """Run the batch's processors on the first position of every block, in place.

    Only that position is committed for their requests (see `max_commit`), so a processor is called
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
    """`complete_outputs` around a prefill, whose decode rows go through the ordinary sampler.

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


def draw_unfiltered_alone(
    original: Callable[..., Any],
    probs: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    need_min_p_sampling: bool,
    sampling_seed: Tensor | None,
    positions: Tensor,
    **options: Any,
) -> Any:
    """AROUND hook on the torch sampler: a request without filters draws as if it were alone.

    A seed is hashed with the column of a token, and the sampler sorts the columns as soon as one
    request of the batch filters. Alone, an unfiltered request is drawn over unsorted columns; so it
    is here.

    Args:
        original: SGLang's sampler.
        probs: [n, vocab] float32.
        top_ks: [n] int32.
        top_ps: [n] float32.
        min_ps: [n] float32.
        need_min_p_sampling: whether a request has min-p; never with a seed.
        sampling_seed: [n] int64, None without --enable-deterministic-inference.
        positions: [n] int64.
        options: passed on.

    Source: sglang/srt/layers/sampler.py:Sampler._sample_from_probs.
    """
    filtered = original(
        probs, top_ks, top_ps, min_ps, need_min_p_sampling, sampling_seed, positions, **options
    )
    if sampling_seed is None or options.get("return_filtered_probs"):
        return filtered
    alone = sampling_from_probs_torch(probs, sampling_seed=sampling_seed, positions=positions)
    unfiltered = (top_ks == TOP_K_ALL) & (top_ps == 1.0)
    return torch.where(unfiltered, alone, filtered)
