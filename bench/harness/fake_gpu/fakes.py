"""A server without a GPU: the worker's own code, on fake CUDA tensors.

The two model forwards return tensors of the right shapes; everything else of a decode step is what
serves: the worker and its parts, SGLang's slot plans and forward batches, its drafter's weights and
KV pool. A custom op on fake tensors launches no kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from dflash_kernels.types import LayerCaches
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.rotary_embedding import factory
from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.models.dflash import DFlashDraftModel
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Qwen3Config

from bench.harness.fake_gpu.capture_guard import GRAPH, SCHEDULER, CaptureGuard
from bench.harness.fake_gpu.planning import Planner
from bench.harness.fake_gpu.traffic import (
    BLOCK,
    CONTEXT,
    PUBLIC,
    Anything,
    Sizes,
    new,
)

TAPS = (1, 10, 19, 28, 37)
LAYERS = 5


@torch.library.custom_op("dflash_bench::rms_norm", mutates_args=())
def _rms_norm(x: Tensor) -> Tensor:
    """Stands for the one kernel that SGLang's norm is on CUDA."""
    raise NotImplementedError


@_rms_norm.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@contextmanager
def fake_gpu(sizes: Sizes = PUBLIC, **flags: Any) -> Iterator[None]:
    """Tensors that are only shapes, and no NVIDIA driver; arguments are those of `one_rank`."""
    with ExitStack() as stack:
        stack.enter_context(one_rank(sizes, **flags))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(mock.patch.object(LayerCaches, "of", _caches_of))
        stack.enter_context(mock.patch.object(torch.cuda, "current_stream"))
        stack.enter_context(mock.patch.object(Tensor, "record_stream"))
        yield


@contextmanager
def one_rank(sizes: Sizes, **more_flags: Any) -> Iterator[None]:
    """SGLang's configuration for one rank.

    Args:
        sizes: of the server.
        more_flags: SGLang's, beside those that every server has.
    """
    group = SimpleNamespace(world_size=1, rank_in_group=0, ranks=[0], device_group=None)
    flags = {
        "speculative_algorithm": "DFLASH",
        "speculative_num_draft_tokens": BLOCK,
        "speculative_draft_model_path": "none",
        "max_running_requests": sizes.max_requests,
        "page_size": 1,
        **more_flags,
    }
    with (
        get_context().override_server_args(**flags),
        get_parallel().override(tp_group=group, tp_rank=0, attn_tp_rank=0),
        # SGLang keeps rotary tables for all models of a process: none of these may stay.
        mock.patch.dict(factory._ROPE_DICT, clear=True),
    ):
        yield


def _caches_of(keys: Any, values: Any, scales: Tensor | None = None) -> LayerCaches:
    """`LayerCaches.of` without addresses, which fake tensors have not."""
    return LayerCaches(keys, values, new(len(keys), 2), scales)


class FakeServer:
    """Runners of a verifier and a drafter whose forwards only have shapes."""

    def __init__(self, sizes: Sizes = PUBLIC, cache_dtype: torch.dtype | None = None) -> None:
        """Makes the runners.

        Args:
            sizes: of the models and pools.
            cache_dtype: of the KV pool; None: of the weights.
        """
        self.sizes = sizes
        self.cache_dtype = cache_dtype or sizes.dtype
        self.guard = CaptureGuard()  # of the step that runs
        rows = sizes.max_requests + 1
        self.req_to_token = self.zeros(rows, CONTEXT, dtype=torch.int32)
        self.lengths = self.zeros(rows)  # the scheduler's, of every request
        self.drafter = self._drafter()
        attention = self.drafter.layers[0].self_attn
        self.pool = MHATokenToKVPool(
            size=sizes.slots,
            page_size=1,
            dtype=self.cache_dtype,
            head_num=attention.num_kv_heads,
            head_dim=attention.head_dim,
            layer_num=LAYERS,
            device=sizes.device,
            enable_memory_saver=False,
            enable_alt_stream=False,
        )
        self.draft_runner = self._runner(model=self.drafter, forward=self._draft_forward)
        self.verifier_runner = self._runner(
            model=_Verifier(sizes),
            sampler=None,
        )
        self.target_worker = SimpleNamespace(
            model_runner=self.verifier_runner,
            device=sizes.device,
            forward_batch_generation=self._verify_forward,
        )

    def zeros(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """A tensor on the server's device."""
        return torch.zeros(shape, dtype=dtype, device=self.sizes.device)

    def _drafter(self) -> DFlashDraftModel:
        sizes = self.sizes
        config = Qwen3Config(
            vocab_size=sizes.vocabulary,
            hidden_size=sizes.hidden,
            intermediate_size=4 * sizes.hidden,
            num_hidden_layers=LAYERS,
            num_attention_heads=2 * sizes.kv_heads,
            num_key_value_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            block_size=BLOCK,
            num_target_layers=40,
            dflash_config={"target_layer_ids": list(TAPS), "mask_token_id": 3},
        )
        torch.set_default_dtype(sizes.dtype)
        with torch.device(sizes.device):
            model = DFlashDraftModel(config).eval()
        torch.set_default_dtype(torch.float32)
        model.hidden_norm.forward = _rms_norm
        return model

    def _runner(self, **own: Any) -> Any:
        translator = KVIndexTranslator(
            req_to_token=self.req_to_token,
            token_to_kv_pool_allocator=None,
            token_to_kv_pool=self.pool,
            page_size=1,
            device=self.sizes.device,
        )
        planner = self._planner(translator)
        return Anything(
            device=self.sizes.device,
            is_draft_worker=False,
            kv_index_translator=translator,
            attn_backend=planner,
            _get_attention_backend=lambda: planner,
            token_to_kv_pool=self.pool,
            kv_cache_dtype=self.cache_dtype,
            req_to_token_pool=SimpleNamespace(req_to_token=self.req_to_token),
            model_config=Anything(vocab_size=self.sizes.vocabulary, hf_config=self.drafter.config),
            ngram_embedding_manager=SimpleNamespace(enabled=False),
            capture_tail_hooks=[],
            **own,
        )

    def _planner(self, translator: KVIndexTranslator) -> Any:
        """A model's attention backend."""
        return Planner(lambda: self.guard, translator, self.sizes.max_requests)

    def _draft_forward(self, forward_batch: Any) -> Any:
        """As a graph is replayed: what was folded into it runs, and counts, inside."""
        self.draft_runner.attn_backend.init_forward_metadata(forward_batch)
        tokens = forward_batch.input_ids.shape[0]
        output = LogitsProcessorOutput(
            next_token_logits=None,
            hidden_states=new(tokens, self.sizes.hidden, dtype=self.sizes.dtype),
        )
        with self.guard.section(GRAPH):
            for hook in self.draft_runner.capture_tail_hooks:
                hook(self.draft_runner, output, forward_batch, tokens)
        return SimpleNamespace(logits_output=output, can_run_graph=True)

    def _verify_forward(
        self, *, forward_batch: Any, skip_attn_backend_init: bool | None = None, **_: Any
    ) -> GenerationBatchResult:
        if not skip_attn_backend_init:
            self.verifier_runner.attn_backend.init_forward_metadata(forward_batch)
        tokens = forward_batch.input_ids.shape[0]
        logits, taps = self._verified(tokens)
        output = LogitsProcessorOutput(next_token_logits=logits, hidden_states=taps)
        return GenerationBatchResult(logits_output=output, can_run_cuda_graph=True)

    def _verified(self, tokens: int) -> tuple[Tensor, Tensor]:
        """What a verify of so many tokens returns: logits and tapped hidden states."""
        return (
            new(tokens, self.sizes.vocabulary, dtype=torch.float32),
            new(tokens, len(TAPS) * self.sizes.hidden, dtype=self.sizes.dtype),
        )

    @contextmanager
    def guarded(self, *, strict: bool = True) -> Iterator[CaptureGuard]:
        """A step, as the scheduler runs it."""
        with CaptureGuard(strict=strict) as self.guard, torch.inference_mode():
            yield self.guard

    def publish(self, rows: Tensor) -> Callable[[Tensor], None]:
        """The scheduler's part of a publish, without its event."""
        relay = SimpleNamespace(
            _relay=None,
            new_seq_lens_buf=self.lengths,
            needs_confidence_relay=False,
            spec_algo=SpeculativeAlgorithm.NONE,
        )

        def on_publish(new_seq_lens: Tensor) -> None:
            with self.guard.section(SCHEDULER):
                FutureMap.publish(relay, rows, new_seq_lens)

        return on_publish


class _Verifier(nn.Module):
    """What a worker borrows from the verifier: its embedding and its head."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        where: Any = {"device": sizes.device, "dtype": sizes.dtype}
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden, **where)
        columns = -(-sizes.vocabulary // 64) * 64  # as SGLang pads a head
        self.lm_head = nn.Linear(sizes.hidden, columns, bias=False, **where)
        head: Any = self.lm_head
        head.quant_method = SimpleNamespace(
            apply=lambda head, x, bias: nn.functional.linear(x, head.weight, bias)
        )
        head.shard_indices = SimpleNamespace(
            num_org_elements=sizes.vocabulary,
            num_elements_padded=columns,
            org_vocab_start_index=0,
            num_added_elements=0,
        )

    def get_input_embeddings(self) -> nn.Module:
        """The token table."""
        return self.embedding
