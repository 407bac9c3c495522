"""From SGLang's packed tokens and slots to blocks and rows.

Slots index SGLang's state pools. A negative slot marks padding: its results are not read, and it is
sent to slot 0, which the pools keep for that.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_sglang.cpu.gated_delta.delta_rule import Block, gates, unit_length


def equal_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    scale: float | None,
    requests: int,
) -> Block:
    """Tokens of equally long requests, [total, heads, dim] or [total, heads], as a block."""
    shape = (requests, len(value) // max(requests, 1))
    rows = torch.arange(len(value)).view(shape)
    decay, beta = gates(a, b, a_log, dt_bias, precision(value))
    return pack_block(query, key, value, decay, beta, scale, rows)


def pack_block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    scale: float | None,
    rows: Tensor,
) -> Block:
    """Packed tokens as a block.

    Args:
        query: [total, key_heads, K].
        key: as query.
        value: [total, heads, V].
        decay: [total, heads].
        beta: [total, heads].
        scale: of the queries; 1 / sqrt(K) by default.
        rows: [requests, tokens] int64, places of the tokens; ``total`` for padding.
    """
    dtype = precision(value)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    parts = [
        unit_length(query.to(dtype)) * scale,
        unit_length(key.to(dtype)),
        value.to(dtype),
        decay.to(dtype),
        beta.to(dtype),
    ]
    if int(rows.max()) == len(value):
        parts = [F.pad(part, (0, 0) * (part.dim() - 1) + (0, 1)) for part in parts]
    return Block(*(part[rows].transpose(1, 2) for part in parts))


def token_rows(starts: Tensor, lengths: Tensor, padding: int) -> Tensor:
    """[requests, longest] int64: where each request's tokens are, ``padding`` behind its end."""
    step = torch.arange(int(lengths.max()))
    return torch.where(step < lengths[:, None], starts[:, None] + step, padding)


def precision(x: Tensor) -> torch.dtype:
    """What to compute in: float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)


def usable(slots: Tensor) -> Tensor:
    """Slots as int64, padding sent to the slot that is kept for it."""
    return slots.clamp(min=0).long()
