"""Ops that planning attention dispatches: SGLang's FlashInfer planner for captured verifies.

FlashInfer's own plan is C++; in its place one op is counted, the copy of its work list to the
device.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from sglang.srt.layers.attention import flashinfer_backend
from sglang.srt.mem_cache import kv_index_translator
from torch import Tensor

from bench.harness.fake_gpu.capture_guard import PLAN, CaptureGuard
from bench.harness.fake_gpu.traffic import new


class Planner:
    """Stands for a FlashInfer backend; both forwards of a step have one."""

    def __init__(
        self,
        guard: Callable[[], CaptureGuard],
        translator: kv_index_translator.KVIndexTranslator,
        max_requests: int,
    ) -> None:
        """Makes a backend's planner.

        Args:
            guard: of the step that runs.
            translator: of the model runner.
            max_requests: of the server.
        """
        self._guard = guard
        updater = object.__new__(flashinfer_backend.FlashInferIndicesUpdaterPrefill)
        vars(updater).update(
            num_qo_heads=16,
            num_kv_heads=8,
            head_dim=128,
            data_type=torch.bfloat16,
            q_data_type=torch.bfloat16,
            attn_backend=SimpleNamespace(kv_index_translator=translator),
            kv_last_page_len=_integers(max_requests),
            kv_indptr=[_integers(max_requests + 1)],
            qo_indptr=[_integers(max_requests + 1)],
            prefill_wrapper_ragged=None,
        )
        self._updater = updater

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan a captured verify, as before a replay."""
        guard = self._guard()
        gather = guard.kernel("sglang::kv_indices")
        with (
            guard.section(PLAN),
            mock.patch.object(kv_index_translator, "create_flashinfer_kv_indices_triton", gather),
        ):
            self._updater.update_single_wrapper(
                forward_batch.req_pool_indices,
                forward_batch.seq_lens,
                forward_batch.seq_lens_cpu,
                forward_batch.seq_lens_sum,
                prefix_lens=None,
                prefill_wrappers=[self._wrapper(forward_batch.batch_size)],
                use_ragged=False,
                encoder_lens=None,
                spec_info=forward_batch.spec_info,
                plan=forward_batch.kv_loc_plan,
            )

    def _wrapper(self, batch: int) -> Any:
        """A wrapper with the buffers that a graph keeps."""
        wrapper = SimpleNamespace(
            is_cuda_graph_enabled=True,
            device=torch.device("cuda:0"),
            _backend="fa2",
            _cached_module=SimpleNamespace(plan=self._guard().kernel("flashinfer::plan")),
            _max_total_num_rows=None,
            _custom_mask_buf=None,
            _qo_indptr_buf=_integers(batch + 1),
            _paged_kv_indptr_buf=_integers(batch + 1),
            _paged_kv_last_page_len_buf=_integers(batch),
            _paged_kv_indices_buf=_integers(1 << 20),
            _float_workspace_buffer=None,
            _int_workspace_buffer=None,
            _pin_memory_int_workspace_buffer=None,
        )
        wrapper.begin_forward = partial(flashinfer_backend.fast_prefill_plan, wrapper)
        return wrapper


def _integers(size: int) -> Tensor:
    return new(size, dtype=torch.int32)
