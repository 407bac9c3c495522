"""SGLang's KV pool without Triton."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, move_kv_cache_native
from torch import Tensor

from dflash_sglang.errors import PlatformError


class CpuKVPool(MHATokenToKVPool):
    """SGLang's pool with a layer's keys and values in one tensor, written by torch.

    ``kv_pair(layer)[0]`` and ``[1]`` are the pool's key and value buffers of the layer; with both
    in one tensor, attention gathers keys and values in one call.
    """

    _pairs: list[Tensor]  # per layer [2, slots, kv_heads, dim]

    def _create_buffers_normal(self) -> None:
        shape, value_shape = self._kv_buffer_shapes()
        if shape != value_shape:
            raise PlatformError(
                f"the KV pool on CPU needs keys and values of one shape, this model has "
                f"{tuple(shape)} and {tuple(value_shape)}; serve it on a GPU"
            )
        self._pairs = [
            torch.zeros((2, *shape), dtype=self.store_dtype, device=self.device)
            for _ in range(self.layer_num)
        ]
        self.k_buffer = [pair[0] for pair in self._pairs]
        self.v_buffer = [pair[1] for pair in self._pairs]

    def kv_pair(self, layer_id: int) -> Tensor:
        """Keys and values of a layer.

        Args:
            layer_id: index of the layer in the model.

        Returns:
            [2, slots, kv_heads, dim], of the pool's dtype; padding is written to slot 0.
        """
        # FP8 is stored as bytes, of which torch has an indexed write.
        return self._pairs[layer_id - self.start_layer].view(self.dtype)

    def _init_kv_copy_and_warmup(self) -> None:
        self._kv_copy_config = None  # SGLang's warm-up launches a Triton kernel

    def _move_kv_cache_impl(self, tgt_loc: Tensor, src_loc: Tensor) -> None:
        move_kv_cache_native(self.k_buffer, self.v_buffer, tgt_loc, src_loc)

    def _store_kv_layer(
        self, layer_idx: int, loc: Tensor, cache_k: Tensor, cache_v: Tensor
    ) -> None:
        self.k_buffer[layer_idx].index_copy_(0, loc, cache_k)
        self.v_buffer[layer_idx].index_copy_(0, loc, cache_v)
