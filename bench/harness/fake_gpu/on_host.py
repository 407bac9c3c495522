"""A server whose device is the host: a step takes what its Python and its torch calls take.

The workers are those of the fake GPU, and their tensors are real ones in the host's memory, with
every dimension but the batch as small as can be. In place of device work: both model forwards
return tensors that are there already, Triton kernels and SGLang's sampling kernels are not launched
(the Python around them runs), KV slots are not allocated. What is left is what the host does in a
step: choosing, checking, building the forwards' inputs, calling torch and the ops.
"""

from __future__ import annotations

import contextlib
import sys
from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative import dflash_info_v2, dflash_utils, dflash_worker_v2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch import Tensor, nn
from triton.runtime.jit import JITFunction

from bench.harness.fake_gpu.fakes import TAPS, FakeServer, one_rank
from bench.harness.fake_gpu.traffic import BLOCK, PREFIX, Sizes
from dflash_sglang.step import state as our_state

SMALLEST = Sizes(
    device="cpu",
    dtype=torch.float32,
    vocabulary=1,
    hidden=2,
    kv_heads=1,
    head_dim=2,
    max_requests=256,
    slots=63,  # and one more: buffers lie a multiple of 16 elements apart
)
# What Qwen3 models name in generation_config.json, and SGLang takes as the default of a request.
FILTERS = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


class Launches:
    """Kernels that were not launched."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *_: Any, **__: Any) -> None:
        """Count one."""
        self.count += 1

    def renorm(self, probs: Tensor, *_: Any) -> Tensor:
        """SGLang's kernels that filter probabilities, [n, vocab]."""
        self.count += 1
        return probs


def _same(first: Any, *_: Any, **__: Any) -> Any:
    return first


def _nothing(*_: Any, **__: Any) -> None:
    return None


@contextlib.contextmanager
def device_is_host(**flags: Any) -> Iterator[Launches]:
    """SGLang's configuration for one rank, and no launches.

    Args:
        flags: as of `one_rank`.
    """
    launches = Launches()
    patches: list[tuple[Any, str, Any]] = [
        (JITFunction, "run", launches),
        (Tensor, "record_stream", _nothing),
        (memory_pool, "_is_cuda", True),
        (dflash_worker_v2, "is_dflash_sampling_verify_available", lambda: True),
        (dflash_utils, "_DFLASH_SAMPLING_VERIFY_AVAILABLE", True),
        (dflash_utils, "tree_speculative_sampling_target_only", launches),
        (dflash_utils, "borrow_graph_pool", lambda **_: contextlib.nullcontext()),
        (dflash_utils, "_dflash_top_k_renorm_prob", launches.renorm),
        (dflash_utils, "_dflash_top_p_renorm_prob", launches.renorm),
        (our_state, "alloc_for_spec_decode", _nothing),
        (dflash_info_v2, "alloc_for_spec_decode", _nothing),
        *(
            (module, "runs_triton", lambda tensor: True)
            for name, module in list(sys.modules.items())
            if name.startswith("dflash_") and hasattr(module, "runs_triton")
        ),
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(one_rank(SMALLEST, **flags))
        stack.enter_context(torch.inference_mode())
        for owner, name, stand_in in patches:
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        for buffer in dflash_utils._get_or_create_chain_verify_buffers(
            bs=SMALLEST.max_requests, draft_token_num=BLOCK, device=torch.device("cpu")
        ):
            buffer.zero_()  # SGLang reads indices from what its sampling kernel would write
        yield launches


class HostServer(FakeServer):
    """Its forwards return tensors that are there already."""

    def __init__(self) -> None:
        super().__init__(SMALLEST)
        rows = SMALLEST.max_requests * BLOCK
        self._hidden = self.zeros(rows, SMALLEST.hidden, dtype=SMALLEST.dtype)
        self._taps = self.zeros(rows, len(TAPS) * SMALLEST.hidden, dtype=SMALLEST.dtype)
        self._logits = self.zeros(rows, SMALLEST.vocabulary, dtype=torch.float32)
        self.drafter.hidden_norm.forward = _same
        self.verifier_runner.model.embedding = _Embedding(self._hidden)

    def _planner(self, translator: KVIndexTranslator) -> Any:
        return SimpleNamespace(init_forward_metadata=_nothing)

    def _draft_forward(self, forward_batch: Any) -> Any:
        self.draft_runner.attn_backend.init_forward_metadata(forward_batch)
        hidden = self._hidden[: forward_batch.input_ids.shape[0]]
        output = LogitsProcessorOutput(next_token_logits=None, hidden_states=hidden)
        return SimpleNamespace(logits_output=output, can_run_graph=True)

    def _verified(self, tokens: int) -> tuple[Tensor, Tensor]:
        return self._logits[:tokens], self._taps[:tokens]


class _Embedding(nn.Module):
    """A table whose rows are looked up already."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self._rows = rows

    def forward(self, ids: Tensor) -> Tensor:
        return self._rows[: ids.numel()].view(*ids.shape, -1)


def make_request(row: int, **sampling: Any) -> Req:
    """A running request of SGLang.

    Args:
        row: its place in the pool of requests.
        sampling: parameters; greedy without any.
    """
    params = SamplingParams(max_new_tokens=1000, **(sampling or {"temperature": 0.0}))
    params.normalize(None)
    req = Req(
        f"request-{row}", "", array("q", range(PREFIX)), params, vocab_size=SMALLEST.vocabulary
    )
    req.kv.req_pool_idx = row
    req.kv.kv_committed_len = PREFIX
    req.kv.kv_allocated_len = PREFIX + 2 * BLOCK
    return req


def make_batch(reqs: list[Req], spec_info: Any) -> ScheduleBatch:
    """SGLang's batch of these requests, decoding under overlap.

    Args:
        reqs: made by `make_request`.
        spec_info: what a worker carries from one step to the next.
    """
    bs = len(reqs)
    batch = ScheduleBatch(
        reqs=reqs,
        device=SMALLEST.device,
        enable_overlap=True,
        forward_mode=ForwardMode.DECODE,
        spec_algorithm=SpeculativeAlgorithm.DFLASH,
        spec_info=spec_info,
        seq_lens=torch.full((bs,), PREFIX),
        seq_lens_cpu=torch.full((bs,), PREFIX),
        seq_lens_sum=PREFIX * bs,
        orig_seq_lens=torch.full((bs,), PREFIX),
        req_pool_indices=torch.arange(bs),
        req_pool_indices_cpu=torch.arange(bs),
        can_run_decode_cuda_graph=True,
        tree_cache=SimpleNamespace(supports_swa=lambda: False),
        token_to_kv_pool_allocator=SimpleNamespace(page_size=1),
        model_config=SimpleNamespace(is_encoder_decoder=False),
    )
    batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, SMALLEST.vocabulary)
    return batch
