"""SGLang's ``AttentionBackend`` interface on top of ``attend``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool
from torch import Tensor, nn

from dflash_sglang.cpu.attention.attend import AttentionGroup, attend, plan_attention
from dflash_sglang.cpu.attention.kv_pool import CpuKVPool
from dflash_sglang.errors import PlatformError

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class CpuAttentionBackend(AttentionBackend):
    """Extend, decode, verify and draft block, with one plan per forward."""

    needs_cpu_seq_lens = False  # the lengths are in host memory on this device

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__()
        pool = model_runner.token_to_kv_pool
        # In a model with recurrent layers, the pool contains that of the attention layers.
        self._layer_index: dict[int, int] | None = None
        if isinstance(pool, HybridLinearKVPool):
            self._layer_index = pool.full_attention_layer_id_mapping
            pool = pool.full_kv_pool
        if not isinstance(pool, CpuKVPool):
            raise PlatformError(
                "the CPU platform supports one KV pool of multi-head attention, this model needs "
                f"a {type(pool).__name__}; for a sliding-window verifier pass "
                "--disable-hybrid-swa-memory"
            )
        self.token_to_kv_pool = pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        self._plan: list[AttentionGroup] = []

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan the batch, once for all layers of the forward."""
        mode, batch = forward_batch.forward_mode, forward_batch.batch_size
        if mode.is_idle() or not batch:
            self._plan = []
            return
        kv_lens = forward_batch.seq_lens[:batch].tolist()
        if mode.is_target_verify():
            width = int(forward_batch.spec_info.draft_token_num)
            q_lens = [width] * batch
            kv_lens = [length + width for length in kv_lens]  # seq_lens excludes the block
        elif mode.is_decode():
            q_lens = [1] * batch
        else:
            q_lens = forward_batch.extend_seq_lens[:batch].tolist()
        pool = self.token_to_kv_pool
        self._plan = plan_attention(
            self.req_to_token_pool.req_to_token,
            forward_batch.req_pool_indices[:batch],
            q_lens,
            kv_lens,
            pool.head_num * pool.head_dim,
        )

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **unsupported: Any,
    ) -> Tensor:
        """Write the layer's new keys and values, then attend; one function for every mode.

        Args:
            q: [tokens, heads * dim].
            k: [tokens, kv_heads, dim], None when they are already in the pool.
            v: as ``k``.
            layer: its head counts, scale, causality and window are read.
            forward_batch: its KV slots to write are read.
            save_kv_cache: whether to write ``k`` and ``v``.
            unsupported: further arguments of a model, such as attention sinks.

        Returns:
            [tokens, heads * dim].

        Raises:
            PlatformError: the model passes further arguments.
        """
        if unsupported:
            names = ", ".join(sorted(unsupported))
            raise PlatformError(f"attention on CPU does not support {names}")
        pool, layer_id = self.token_to_kv_pool, layer.layer_id
        if self._layer_index is not None:
            layer_id = self._layer_index[layer_id]
        if save_kv_cache and k is not None and v is not None:
            pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v, layer_id_override=layer_id)
        return attend(
            self._plan,
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            pool.kv_pair(layer_id),
            layer.scaling,
            causal=layer.attn_type is not AttentionType.ENCODER_ONLY,
            window_left=layer.sliding_window_size,
        )

    forward_decode = forward_extend

    def support_triton(self) -> bool:
        """Whether this backend can run together with Triton kernels: no."""
        return False


def refuse_unsupported_attention(model: nn.Module) -> None:
    """Refuse a model whose attention this backend does not support.

    Args:
        model: the model just loaded.

    Raises:
        PlatformError: a layer has soft-capped logits, cross attention, or value heads of another
            width than the keys.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    for name, layer in model.named_modules():
        if not isinstance(layer, RadixAttention):
            continue
        reason = (
            "soft-capped logits"
            if layer.logit_cap > 0
            else "cross attention"
            if layer.is_cross_attention
            else "value heads of another width than the keys"
            if layer.v_head_dim != layer.qk_head_dim
            else None
        )
        if reason:
            raise PlatformError(f"{name} has {reason}, which attention on CPU does not support")
