"""Drawing and accepting in one op, for batches without filters on CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from dflash_kernels.accept_sampled import Acceptance, accept_sampled
from dflash_kernels.dispatch import runs_triton
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from torch import Tensor

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

SEED_END = 2**63 - 1


def draws_fused(batch: ScheduleBatch, logits: Tensor) -> bool:
    """Whether one op draws for all requests of a batch and accepts.

    The others are drawn by SGLang's ordinary sampler: requests with top-k, top-p or min-p and their
    neighbours; requests with custom logit processors, whose logits may be anything; and all under
    --enable-deterministic-inference. There a seed's text must be the one without speculation, draw
    for draw, and SGLang draws from rounded probabilities, the op from the logits themselves: one
    draw in a million would be another.

    Args:
        batch: the decode batch.
        logits: [bs * width, vocab].
    """
    info = batch.sampling_info
    if not runs_triton(logits) or info.sampling_seed is not None:
        return False
    return not info.has_custom_logit_processor and not _any_filters(batch)


def _any_filters(batch: ScheduleBatch) -> bool:
    info = batch.sampling_info
    # SGLang counts a greedy request as one with top-k.
    if not (info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling):
        return False
    sampled = (req.sampling_params for req in batch.reqs if req.sampling_params.top_k > 1)
    return any(one.top_k != TOP_K_ALL or one.top_p != 1.0 or one.min_p > 0 for one in sampled)


def draw_and_accept(
    batch: ScheduleBatch, draft_ids: Tensor, logits: Tensor, limit: Tensor | None
) -> Acceptance:
    """Sample and match: see `dflash_kernels.accept_sampled`.

    Args:
        batch: the decode batch, for which `draws_fused` holds.
        draft_ids: [bs, width] int64, column 0 the anchor.
        logits: [bs * width, vocab], adjusted; kept.
        limit: [bs] int32, most drafts that each request may accept; None for all.
    """
    info = batch.sampling_info
    temperatures = info.temperatures.view(-1)
    if info.is_any_greedy:
        temperatures = temperatures.masked_fill(info.top_ks <= 1, 0.0)
    # Fresh numbers every step: a request without a seed promises no text.
    seeds = torch.randint(SEED_END, (len(draft_ids),), device=logits.device)
    return accept_sampled(logits, draft_ids, batch.seq_lens, temperatures, seeds, limit=limit)
