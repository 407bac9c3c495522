"""Penalties along a drafted block: position i counts the output so far and drafts 1..i."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PenaltyParams(NamedTuple):
    """Penalties of n requests, as in the OpenAI API and SGLang."""

    frequency: Tensor  # [n] float32, subtracted once per occurrence; 0 is neutral
    presence: Tensor  # [n] float32, subtracted once if the token occurred; 0 is neutral
    repetition: Tensor  # [n] float32, divides positive and multiplies negative logits; 1 is neutral
    min_new_tokens: Tensor  # [n] int64, stop tokens are impossible before that many tokens
    stop_ids: Tensor  # [n, s] int64, padded with the vocabulary size


def counts_along(counts: Tensor, draft_ids: Tensor) -> Tensor:
    """Occurrences of every token in the output, as each position of the block sees it.

    Args:
        counts: [n, vocab] int32, occurrences in the output up to and including the anchor.
        draft_ids: [n, width] int64, column 0 the anchor.

    Returns:
        [n, width, vocab] int32; position i counts drafts 1..i on top.
    """
    n, width = draft_ids.shape
    along = counts[:, None, :].repeat(1, width, 1)
    drafts = draft_ids[:, None, 1:].expand(n, width, width - 1)
    position = torch.arange(width, device=draft_ids.device)
    seen = (position[1:] <= position[:, None]).to(counts.dtype)  # [width, width - 1]
    return along.scatter_add_(2, drafts, seen.expand(n, width, width - 1))


def additive_penalties(counts: Tensor, output_lens: Tensor, params: PenaltyParams) -> Tensor:
    """What is added to the logits: frequency, presence, -inf for a stop token that is too early.

    Args:
        counts: [n, width, vocab] int32, occurrences in the output at each position.
        output_lens: [n, width] int64, tokens of output before each position's prediction.
        params: the penalties.

    Returns:
        [n, width, vocab] float32.
    """
    vocab = counts.shape[-1]
    additive = -params.frequency[:, None, None] * counts
    additive -= params.presence[:, None, None] * (counts > 0)
    is_stop = torch.zeros(len(params.stop_ids), vocab + 1, dtype=torch.bool, device=counts.device)
    is_stop = is_stop.scatter_(1, params.stop_ids, True)[:, None, :vocab]
    too_short = output_lens < params.min_new_tokens[:, None]
    return additive.masked_fill_(is_stop & too_short[..., None], float("-inf"))


def scaling_penalties(counts: Tensor, params: PenaltyParams) -> Tensor:
    """What positive logits are divided by and negative ones multiplied with.

    Args:
        counts: [n, width, vocab] int32.
        params: the penalties.

    Returns:
        [n, width, vocab] float32.
    """
    return torch.where(counts > 0, params.repetition[:, None, None], 1.0)


def apply_penalties(
    logits: Tensor, counts: Tensor, output_lens: Tensor, params: PenaltyParams
) -> Tensor:
    """Penalised logits: the additive rules first, then the scaling one.

    Args:
        logits: [n, width, vocab] float32.
        counts: [n, width, vocab] int32, occurrences in the output at each position.
        output_lens: [n, width] int64, tokens of output before each position's prediction.
        params: the penalties.

    Returns:
        [n, width, vocab] float32, new.

    Source: the rules and their order are those of sglang/srt/sampling/penaltylib and of
    SamplingBatchInfo._apply_pre_grammar_logits_transforms, which count output tokens only.
    """
    penalised = logits + additive_penalties(counts, output_lens, params)
    scale = scaling_penalties(counts, params)
    return torch.where(penalised < 0, penalised * scale, penalised / scale)


def count_committed(counts: Tensor, output_ids: Tensor, commit_len: Tensor) -> Tensor:
    """Add what a step commits.

    Args:
        counts: [n, vocab] int32.
        output_ids: [n, width] int64.
        commit_len: [n] int32, leading columns of `output_ids` that are committed.

    Returns:
        [n, vocab] int32, new.
    """
    position = torch.arange(output_ids.shape[1], device=output_ids.device)
    committed = (position < commit_len[:, None]).to(counts.dtype)
    return counts.scatter_add(1, output_ids, committed)
