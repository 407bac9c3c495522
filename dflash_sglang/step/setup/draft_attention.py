"""The drafter's attention on CUDA: FlashInfer, planned for blocks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.utils.common import async_h2d_stack
from torch import Tensor
from torch.nn.functional import pad

from dflash_sglang.core.draft_attention import (
    AttentionWindow,
    PagedLayout,
    Shape,
    paged_layout,
    plan,
)
from dflash_sglang.step.setup.shared_buffers import borrow_plan

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

CACHE_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)


class BlockAttention(AttentionBackend):
    """Attention of drafted blocks over context and block.

    SGLang's FlashInfer backend gives a block of a sliding-window layer one window for all its slots
    and reads lengths back from the device to plan it. This one plans every kind of layer from the
    lengths on the host, and each block position has its own window (`core/draft_attention.py`).
    It serves what a drafter runs, blocks in TARGET_VERIFY mode, and nothing else.
    """

    def __init__(self, runner: ModelRunner, workspace: Tensor, block_size: int) -> None:
        super().__init__()
        self.kv_index_translator = runner.kv_index_translator
        self._pool = runner.token_to_kv_pool
        self._workspace = workspace
        self._block_size = block_size
        layers = attention_layers(runner)
        self._windows = {layer.layer_id: window_of(layer) for layer in layers}
        self._shape = shape_of(layers[0], runner.dtype, runner.token_to_kv_pool.dtype)
        self._columns = runner.req_to_token_pool.req_to_token.shape[1]
        self._eager = {window: self._wrapper() for window in set(self._windows.values())}
        self._captured: dict[int, Mapping[AttentionWindow, Any]] = {}  # by batch size
        self._buffers: dict[AttentionWindow, _Buffers] = {}
        self._planned: Mapping[AttentionWindow, Any] = self._eager
        self._whole: BlockAttention | None = None

    def borrow(self, whole: BlockAttention) -> None:
        """Capture with another one's large buffers; call it before its graphs are captured.

        Args:
            whole: that of the block, whose graphs are captured. Its forwards and these never
                overlap, and each plans anew.
        """
        self._whole = whole

    # ---- what the runners call -----------------------------------------------------------------

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of the rows that pad a batch to a captured size."""
        return 1

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what captured wrappers read, shared by all batch sizes."""
        for window in self._eager:
            longest = self._columns
            if window.window_left >= 0:
                longest = min(longest, window.window_left + self._block_size)
            self._buffers[window] = _Buffers(
                max_bs,
                longest,
                self._workspace.device,
                None if self._whole is None else self._whole._buffers[window].kv_indices,
            )

    def init_forward_metadata_out_graph(
        self, forward_batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Plan a captured batch size."""
        bs = forward_batch.batch_size
        if in_capture:
            self._captured[bs] = {
                window: self._wrapper(**buffers.of(bs)) for window, buffers in self._buffers.items()
            }
            if self._whole is not None and bs in self._whole._captured:
                for window, wrapper in self._captured[bs].items():
                    borrow_plan(wrapper, self._whole._captured[bs][window])
        self._plan(forward_batch, self._captured[bs])

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan a batch that runs eagerly."""
        self._plan(forward_batch, self._eager)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> Tensor:
        """Write the block's keys and values, and attend.

        Args:
            q: [bs * D, heads * head_dim], or with heads apart.
            k: [bs * D, kv_heads, head_dim].
            v: likewise.
            layer: the layer.
            forward_batch: the batch that was planned.
            save_kv_cache: the block's keys and values are not in the cache yet.

        Returns:
            [bs * D, heads * head_dim].
        """
        if save_kv_cache:
            loc = KVWriteLoc.for_layer(forward_batch, layer)
            self._pool.set_kv_buffer(layer, loc, k, v, layer.k_scale, layer.v_scale)
        q = q.contiguous().view(-1, layer.tp_q_head_num, layer.head_dim)
        out = self._planned[self._windows[layer.layer_id]].run(
            q,
            self._pool.get_kv_buffer(layer.layer_id),
            k_scale=layer.k_scale_float,
            v_scale=layer.v_scale_float,
            out=torch.empty_like(q),
        )
        return out.view(len(q), -1)

    # ---- planning ------------------------------------------------------------------------------

    def _wrapper(self, **buffers: Tensor) -> Any:
        # Here, because a machine without CUDA never gets this far.
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        return BatchPrefillWithPagedKVCacheWrapper(
            self._workspace, "NHD", backend="fa2", use_cuda_graph=bool(buffers), **buffers
        )

    def _plan(self, forward_batch: ForwardBatch, wrappers: Mapping[AttentionWindow, Any]) -> None:
        # Exact: the scheduler mirrors lengths on the host for a backend that needs them. Rows that
        # pad a captured batch are shorter than a block and get no context.
        prefix_lens = (forward_batch.seq_lens_cpu - self._block_size).clamp(min=0)
        for window, wrapper in wrappers.items():
            layout = paged_layout(prefix_lens, self._block_size, window)
            if wrapper.is_cuda_graph_enabled:
                self._fill(self._buffers[window].kv_indices, layout, forward_batch)
                plan(wrapper, layout, self._buffers[window].kv_indices[:0], window, self._shape)
            else:
                indices = torch.empty(
                    int(layout.kv_indptr[-1]), dtype=torch.int32, device=self._workspace.device
                )
                self._fill(indices, layout, forward_batch)
                plan(wrapper, layout, indices, window, self._shape)
        self._planned = wrappers

    def _fill(self, indices: Tensor, layout: PagedLayout, forward_batch: ForwardBatch) -> None:
        """Write the slot of every position that is read."""
        starts, kv_lens, indptr = async_h2d_stack(
            [pad(layout.starts, (0, 1)), pad(layout.kv_lens, (0, 1)), layout.kv_indptr],
            device=indices.device,
        )
        bs = len(layout.starts)
        self.kv_index_translator.pack_read_stream(
            forward_batch.kv_loc_plan,
            req_pool_indices=forward_batch.req_pool_indices[:bs],
            seq_lens=kv_lens[:bs],
            indptr=indptr,
            out=indices,
            kv_start_idx=starts[:bs],
        )


class _Buffers:
    """What the captured wrappers of one kind of layer read, at every batch size."""

    def __init__(
        self, max_bs: int, longest: int, device: torch.device, kv_indices: Tensor | None
    ) -> None:
        def new(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        self.kv_indices = new(max_bs * longest) if kv_indices is None else kv_indices
        self._qo_indptr, self._kv_indptr = new(max_bs + 1), new(max_bs + 1)
        self._last_page_lens = new(max_bs)

    def of(self, bs: int) -> dict[str, Tensor]:
        """Constructor arguments of the wrapper for a batch size."""
        return {
            "qo_indptr_buf": self._qo_indptr[: bs + 1],
            "paged_kv_indptr_buf": self._kv_indptr[: bs + 1],
            "paged_kv_indices_buf": self.kv_indices,
            "paged_kv_last_page_len_buf": self._last_page_lens[:bs],
        }


def select_draft_backend(runner: ModelRunner, default: Any, block_size: int) -> Any:
    """Our attention in place of SGLang's FlashInfer backend of a drafter, where it is chosen.

    Another backend stays: it was chosen by flag. So does SGLang's where ours does not
    read the cache's dtype or layout.

    Args:
        runner: of the drafter.
        default: the backend that SGLang made for it.
        block_size: tokens of the blocks.
    """
    if torch.device(runner.device).type != "cuda":
        return default
    from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend

    if type(default) is not FlashInferAttnBackend:
        return default
    if default.use_sliding_window_kv_pool or runner.token_to_kv_pool.dtype not in CACHE_DTYPES:
        logger.warning(
            "DFLASH drafts with SGLang's FlashInfer backend: %s caches of the drafter are not ours"
            " to read. Its sliding-window layers see up to a block more than they should.",
            "sliding-window"
            if default.use_sliding_window_kv_pool
            else runner.token_to_kv_pool.dtype,
        )
        return default
    logger.info("DFLASH drafts with FlashInfer, planned for blocks of %d.", block_size)
    return BlockAttention(runner, default.workspace_buffer, block_size)


def attention_layers(runner: ModelRunner) -> list[RadixAttention]:
    """The drafter's attention layers."""
    return [layer for layer in runner.model.modules() if isinstance(layer, RadixAttention)]


def window_of(layer: RadixAttention) -> AttentionWindow:
    """What a layer's slots see: SGLang keeps the window without the slot itself."""
    return AttentionWindow(layer.sliding_window_size, layer.attn_type != AttentionType.ENCODER_ONLY)


def shape_of(layer: RadixAttention, dtype: torch.dtype, kv_dtype: torch.dtype) -> Shape:
    """The shape that all layers of a drafter share."""
    return Shape(
        num_heads=layer.tp_q_head_num,
        num_kv_heads=layer.tp_k_head_num,
        head_dim=layer.head_dim,
        scale=layer.scaling,
        soft_cap=layer.logit_cap,
        dtype=dtype,
        kv_dtype=kv_dtype,
    )
