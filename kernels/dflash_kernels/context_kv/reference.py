"""Torch form of `context_kv`, and the record of the buffers it writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
ALIGNMENT = 16  # elements: what the kernel's wide stores rely on


class LayerCaches(NamedTuple):
    """KV buffers of all drafter layers; made once, by `of`, from buffers that stay in place."""

    keys: Sequence[Tensor]  # layers x [slots, heads, head_dim]
    values: Sequence[Tensor]  # layers x [slots, heads, head_dim]
    offsets: Tensor  # [layers, 2] int64, elements from keys[0] to the layer's keys and values
    scales: Tensor | None  # [layers, 2] float32, of keys and values; None: 1

    @classmethod
    def of(
        cls, keys: Sequence[Tensor], values: Sequence[Tensor], scales: Tensor | None = None
    ) -> LayerCaches:
        """Describe the buffers of a pool.

        Args:
            keys: a buffer a layer, [slots, heads, head_dim], bfloat16, float16, float32 or
                float8_e4m3fn; all of one shape, dtype and device.
            values: likewise.
            scales: [layers, 2] float32, what FP8 keys and values are divided by.

        Raises:
            ValueError: the buffers differ, a row is not contiguous, buffers do not lie a
                multiple of 16 elements apart, or scales come without FP8.
        """
        first = keys[0]
        for buffer in (*keys, *values):
            like_first = (buffer.shape, buffer.stride(), buffer.dtype, buffer.device) == (
                first.shape,
                first.stride(),
                first.dtype,
                first.device,
            )
            if not like_first or not buffer[0].is_contiguous():
                raise ValueError(
                    "expected buffers [slots, heads, head_dim] of one shape, stride and dtype with"
                    f" contiguous rows; got {tuple(buffer.shape)} {buffer.stride()} {buffer.dtype}"
                    f" beside {tuple(first.shape)} {first.stride()} {first.dtype}"
                )
        if scales is not None and first.dtype != FP8:
            raise ValueError(f"scales are for {FP8} buffers, got {first.dtype}")
        offsets = torch.tensor(
            [
                [(b.data_ptr() - first.data_ptr()) // first.element_size() for b in pair]
                for pair in zip(keys, values, strict=True)
            ],
        )
        if (offsets % ALIGNMENT).any():
            raise ValueError(
                f"expected buffers a multiple of {ALIGNMENT} elements apart, got {offsets.tolist()}"
            )
        offsets = offsets.to(first.device)
        return cls(keys, values, offsets, scales)


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
