"""From the arguments of SGLang's kernels to padded blocks, and the check of their options.

SGLang packs the tokens of a batch one request after another. State slots index its pools of
recurrent states; a negative slot marks padding, and slot 0 is reserved for it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_sglang.cpu.gated_delta.delta_rule import TokenBlock, gates, unit_length
from dflash_sglang.errors import PlatformError


def require(condition: bool, kernel: str, supported: str) -> None:
    """Refuse an option of a kernel that its torch replacement does not implement.

    Args:
        condition: whether the arguments are supported.
        kernel: name of SGLang's kernel.
        supported: what is supported, for the message.

    Raises:
        PlatformError: the condition is False.
    """
    if not condition:
        raise PlatformError(
            f"{kernel} supports only {supported} on a CPU; serve this model on a GPU"
        )


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
) -> TokenBlock:
    """The tokens of requests of equal length as a block; arguments as `pack_block` and `gates`."""
    shape = (requests, len(value) // max(requests, 1))
    rows = torch.arange(len(value)).view(shape)
    decay, beta = gates(a, b, a_log, dt_bias, compute_dtype(value))
    return pack_block(query, key, value, decay, beta, scale, rows)


def pack_block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    scale: float | None,
    rows: Tensor,
) -> TokenBlock:
    """Packed tokens as a padded block.

    Args:
        query: [total, key_heads, K].
        key: as query.
        value: [total, heads, V].
        decay: [total, heads].
        beta: [total, heads].
        scale: of the queries; 1 / sqrt(K) by default.
        rows: [requests, tokens] int64, index of each token in the packed tensors; ``total`` for
            padding.
    """
    dtype = compute_dtype(value)
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
    return TokenBlock(*(part[rows].transpose(1, 2) for part in parts))


def token_rows(starts: Tensor, lengths: Tensor, padding: int) -> Tensor:
    """[requests, longest] int64: index of each packed token, ``padding`` after a request's end."""
    step = torch.arange(int(lengths.max()))
    return torch.where(step < lengths[:, None], starts[:, None] + step, padding)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype to compute in: float32 or higher."""
    return torch.promote_types(x.dtype, torch.float32)


def valid_slots(slots: Tensor) -> Tensor:
    """State slots as int64, with padding mapped to slot 0."""
    return slots.clamp(min=0).long()
