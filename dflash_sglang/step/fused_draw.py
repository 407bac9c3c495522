"""Drawing and accepting in one op, on CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from dflash_kernels.accept_filtered import accept_filtered
from dflash_kernels.accept_sampled import accept_sampled
from dflash_kernels.dispatch import runs_triton
from dflash_kernels.types import Acceptance, Filters
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from torch import Tensor

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

SEED_END = 2**63 - 1


def draws_fused(batch: ScheduleBatch, logits: Tensor) -> bool:
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
    """
    info = batch.sampling_info
    if not runs_triton(logits) or info.sampling_seed is not None:
        return False
    return not info.has_custom_logit_processor and _most_filters(batch) < 3


def _most_filters(batch: ScheduleBatch) -> int:
    """How many of top-k, top-p and min-p a sampled request of the batch has, at most."""
    info = batch.sampling_info
    # SGLang counts a greedy request as one with top-k.
    if not (info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling):
        return 0
    sampled = (req.sampling_params for req in batch.reqs if req.sampling_params.top_k > 1)
    return max((one.top_k != TOP_K_ALL) + (one.top_p != 1.0) + (one.min_p > 0) for one in sampled)


def draw_and_accept(
    batch: ScheduleBatch, draft_ids: Tensor, logits: Tensor, limit: Tensor | None
) -> Acceptance:
    """Sample and match: see `dflash_kernels.accept_sampled` and `accept_filtered`.

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
    given = (logits, draft_ids, batch.seq_lens, temperatures, seeds)
    if _most_filters(batch) == 0:
        return accept_sampled(*given, limit=limit)
    filters = Filters(info.top_ks, info.top_ps, info.min_ps)
    return accept_filtered(*given, filters, limit=limit)
