"""SGLang's own DFLASH worker, made on a fake server as it is on CUDA."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import torch
from sglang.kernels.ops.speculative import fused_kv_materialize
from sglang.srt.speculative import dflash_utils
from sglang.srt.speculative import dflash_worker_v2 as module
from sglang.srt.speculative.draft_worker_common import (
    make_draft_block_spec_info,
    make_draft_input_v2,
    make_draft_sampler_capture_hook,
)
from sglang.srt.speculative.spec_tp_sync import SpecTpSync

from bench.harness.fake_gpu.capture_guard import CaptureGuard, Kernel
from bench.harness.fake_gpu.fakes import FakeServer
from bench.harness.fake_gpu.traffic import BLOCK, CONTEXT, Traffic, make_batch, new


@contextmanager
def sglang_kernels(server: FakeServer, guard: CaptureGuard) -> Iterator[None]:
    """In place of the kernels that SGLang launches past torch's dispatcher."""

    def kernel(name: str) -> Kernel:
        return guard.kernel(f"sglang::{name}")

    patches = [
        (module, "_prepare_dflash_draft_block_unchecked", kernel("prepare_block")),
        (module, "_compute_dflash_accept_bonus_triton_unchecked", kernel("accept_bonus")),
        (module, "is_dflash_sampling_verify_available", lambda: True),
        (dflash_utils, "tree_speculative_sampling_target_only", kernel("tree_sampling")),
        (dflash_utils, "_DFLASH_SAMPLING_VERIFY_AVAILABLE", True),
        (dflash_utils, "borrow_graph_pool", lambda **_: contextlib.nullcontext()),
        (fused_kv_materialize, "_fused_norm_rope_kernel_stacked", kernel("fused_norm_rope")),
        (server.pool, "set_kv_buffer_prefix_valid", kernel("set_kv_buffer")),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in patches:
            stack.enter_context(mock.patch.object(owner, name, replacement, create=True))
        yield


class SGLangStep:
    """Decode steps of SGLang's worker."""

    def __init__(self, server: FakeServer) -> None:
        self._server = server
        self._worker = make_worker(server)

    def run(self, traffic: Traffic) -> CaptureGuard:
        """One steady step; only counted, as it is not ours to refuse."""
        state = make_draft_input_v2(
            bonus_tokens=new(traffic.batch), new_seq_lens=new(traffic.batch)
        )
        batch = make_batch(traffic, state)
        publish = self._server.publish(batch.req_pool_indices)
        with self._server.guarded(strict=False) as guard, sglang_kernels(self._server, guard):
            self._worker.forward_batch_generation(batch, on_publish=publish)
        return guard


def make_worker(server: FakeServer) -> module.DFlashWorkerV2:
    """The worker as its constructor leaves it on CUDA, graphs captured, buffers allocated."""
    worker = module.DFlashWorkerV2.__new__(module.DFlashWorkerV2)
    lm_head, device = server.verifier_runner.model.lm_head, torch.device(server.sizes.device)
    sampler = module._DflashDraftSampler(
        weight=lm_head.weight,
        block_size=BLOCK,
        num_org=lm_head.shard_indices.num_org_elements,
        org_vocab_start=0,
        max_bs=server.sizes.max_requests,
    )
    server.draft_runner.capture_tail_hooks[:] = [make_draft_sampler_capture_hook(sampler)]
    attention = server.drafter.layers[0].self_attn
    values = {
        "_target_worker": server.target_worker,
        "model_runner": server.verifier_runner,
        "draft_model_runner": server.draft_runner,
        "draft_model": server.drafter,
        "draft_parallel_layout": SimpleNamespace(tp_group=None),
        "device": server.sizes.device,
        "block_size": BLOCK,
        "selector": None,
        "lilicorr": None,
        "_selector_sample": None,
        "_is_domino": False,
        "_draft_sampler": sampler,
        "_mask_token_id": 3,
        "_noise_embed_scale": 1.0,
        "_full_embed_gpu": None,
        "_need_mamba_verify_commit": False,
        "_target_logits_processor": None,
        "use_compact_draft_cache": False,
        "_use_triton_prepare_block": True,
        "_use_triton_accept_bonus": True,
        "_use_fused_kv_materialize": True,
        "_draft_block_ids_buf": None,
        "_accept_bonus_buffer_cap": 0,
        "_accept_bonus_buffer_slot": 0,
        "_warned_sampling_fallback": False,
        "_tp_sync": SpecTpSync(SimpleNamespace(world_size=1)),
        "_draft_block_spec_info": make_draft_block_spec_info(draft_token_num=BLOCK, device=device),
        "_fused_kv_helper": fused_kv_materialize.FusedKVMaterializeHelper(
            layers=server.drafter.layers,
            rotary_emb=attention.rotary_emb,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            device=device,
            max_position_hint=CONTEXT,
        ),
    }
    for name, value in values.items():
        setattr(worker, name, value)
    with CaptureGuard():  # what the first steps allocate; on the host it is real
        worker._ensure_draft_block_buffers(server.sizes.max_requests)
        worker._ensure_accept_bonus_buffers(server.sizes.max_requests)
    return worker
