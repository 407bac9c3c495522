"""Torch form of `accept_sampled`; runs on every device."""

import torch
from torch import Tensor

from dflash_kernels.accept_match.reference import accept_match
from dflash_kernels.accept_sampled.hashing import gumbel, murmur_hash32
from dflash_kernels.types import Acceptance


def accept_sampled(
    logits: Tensor,
    draft_ids: Tensor,
    prefix_lens: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    *,
    limit: Tensor | None = None,
) -> Acceptance:
    """Reference of `dflash_kernels.accept_sampled.accept_sampled`."""
    _, scores = noisy_scores(logits, draft_ids, prefix_lens, temperatures, seeds)
    return accept_match(draft_ids, scores.argmax(dim=-1), prefix_lens, limit=limit)


def noisy_scores(
    logits: Tensor, draft_ids: Tensor, prefix_lens: Tensor, temperatures: Tensor, seeds: Tensor
) -> tuple[Tensor, Tensor]:
    """Logits over the temperature, float32, and with their Gumbel noise, float64: [bs, width, V].

    Greedy rows are divided by 1 and get no noise. Arguments as in `accept_sampled`.
    """
    bs, width = draft_ids.shape
    by_request = logits.float().view(bs, width, logits.shape[1])
    by_request = torch.where(by_request.isnan(), -torch.inf, by_request)
    greedy = temperatures[:, None, None] == 0
    scaled = by_request / torch.where(greedy, 1.0, temperatures[:, None, None])
    positions = prefix_lens[:, None] + torch.arange(width, device=logits.device)
    ids = torch.arange(logits.shape[1], device=logits.device)
    hashed = murmur_hash32(seeds.repeat_interleave(width), positions.flatten(), ids)
    noise = gumbel(hashed).view(by_request.shape)
    # float64, as SGLang adds them: among 250k ids the two best are often closer than float32 sees.
    return scaled, scaled.double() + torch.where(greedy, 0.0, noise)
