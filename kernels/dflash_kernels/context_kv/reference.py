"""Torch form of `context_kv`; runs on every device."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_kernels.types import FP8, LayerCaches


def context_kv(
    kv: Tensor,
    norm_weights: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    caches: LayerCaches,
    *,
    eps: float,
    valid_lens: Tensor | None = None,
) -> None:
    """Reference of `dflash_kernels.context_kv.context_kv`."""
    written = slots >= 0
    if valid_lens is not None:
        columns = torch.arange(slots.shape[0] // valid_lens.shape[0], device=slots.device)
        written = written & (columns < valid_lens[:, None]).flatten()
    if not written.all():
        kv, positions, slots = kv[written], positions[written], slots[written]
    keys, values = kv.float().unbind(2)  # [written, layers, heads, head_dim]
    size = torch.linalg.vector_norm(keys, dim=-1, keepdim=True)
    keys = keys * norm_weights.float()[:, None] / (size.square() / keys.shape[-1] + eps).sqrt()
    rotary_dim = cos_sin.shape[1]
    cos, sin = cos_sin[positions].float()[:, None, None].chunk(2, dim=-1)
    first, second = keys[..., :rotary_dim].chunk(2, dim=-1)
    rest = keys[..., rotary_dim:]
    keys = torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
    for layer in range(len(caches.keys)):
        for side, (buffers, rows) in enumerate(((caches.keys, keys), (caches.values, values))):
            scale = None if caches.scales is None else caches.scales[layer, side]
            _write(buffers[layer], slots, rows[:, layer], scale)


def _write(buffer: Tensor, slots: Tensor, rows: Tensor, scale: Tensor | None) -> None:
    if scale is not None:
        rows = rows / scale
    if buffer.dtype == FP8:
        limit = torch.finfo(FP8).max
        rows = rows.clamp(-limit, limit).to(FP8).view(torch.uint8)
        buffer = buffer.view(torch.uint8)  # torch has no indexed write of FP8
    buffer[slots] = rows.to(buffer.dtype)
