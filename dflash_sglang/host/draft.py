"""Drafting: one forward pass of the block-diffusion model proposes a whole block."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from dflash_kernels.block_verify import Proposal
from dflash_kernels.prepare_block import Block
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    enable_num_token_non_padded,
)
from sglang.srt.speculative.draft_worker_common import (
    make_draft_block_spec_info,
    make_draft_sampler_capture_hook,
)
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import draft_tp_context
from torch import Tensor

from dflash_sglang.core.sampled_draft import Candidates, sample_drafts
from dflash_sglang.host.draft_state import host_block_lens
from dflash_sglang.host.draft_tail import DraftTail
from dflash_sglang.host.draft_window import DraftWindow

if TYPE_CHECKING:
    from sglang.srt.configs.draft_parallel import DraftParallelLayout
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
    from sglang.srt.model_executor.model_runner import ModelRunner


class DraftSampling(NamedTuple):
    """How sampled drafts are drawn."""

    temperature: float  # above 0
    top_k: int  # tokens a position is drawn from


class Draft(NamedTuple):
    """One drafted block a request."""

    ids: Tensor  # [bs, block_size] int64, column 0 the anchor
    proposal: Proposal | None  # what the drafts were drawn from; None: each is the most likely one

    def cut_to(self, ids: Tensor) -> Draft:
        """The part of the block that is verified.

        Args:
            ids: [bs, width] int64, its leading columns.
        """
        if self.proposal is None:
            return Draft(ids, None)
        drafts = ids.shape[1] - 1
        return Draft(ids, Proposal(*(columns[:, :drafts] for columns in self.proposal)))


class Drafter:
    """Runs the draft model over one block per request."""

    def __init__(
        self,
        *,
        target_runner: ModelRunner,
        draft_runner: ModelRunner,
        layout: DraftParallelLayout,
        block_size: int,
        max_batch_size: int,
        window: DraftWindow | None,
        mask_embedding: Tensor | None,
        sampling: DraftSampling | None,
    ) -> None:
        self._target_model = target_runner.model
        self._runner = draft_runner
        self._layout = layout
        self._block_size = block_size
        self._window = window
        self._mask_embedding = mask_embedding
        self._embed_tokens = unwrap_lora_layer(self._target_model.get_input_embeddings())
        scale = getattr(self._target_model, "get_dflash_noise_embedding_scale", None)
        self._embedding_scale: float = 1.0 if scale is None else scale()
        lm_head = unwrap_lora_layer(self._target_model.lm_head)
        self._sampling = sampling
        top_k = 1 if sampling is None else sampling.top_k
        self._tail = DraftTail(lm_head, block_size, max_batch_size, top_k)
        self._spec_info = make_draft_block_spec_info(
            draft_token_num=block_size, device=draft_runner.device
        )

    def capture_tail(self) -> None:
        """Fold the head and the argmax into the draft CUDA graph; call before capture."""
        self._runner.capture_tail_hooks.append(make_draft_sampler_capture_hook(self._tail))

    @torch.inference_mode()
    def propose(
        self, batch: ScheduleBatch, block: Block, plan: KVLocPlan, uniforms: Tensor | None
    ) -> Draft:
        """Draft one block per request.

        Args:
            batch: the decode batch; `seq_lens` are the committed lengths.
            block: ids, positions and slots of the block.
            plan: the step's slot ids, shared with the verify.
            uniforms: [bs, block_size - 1] float32 in [0, 1) to draw sampled drafts by; None to take
                the most likely token at every position.
        """
        candidates = self.candidates(batch, block, plan)
        drafted, proposal = candidates.ids[..., 0], None
        if uniforms is not None and self._sampling is not None:
            greedy = batch.sampling_info.top_ks <= 1
            drafted, proposal = sample_drafts(
                candidates, self._sampling.temperature, uniforms, greedy
            )
        return Draft(torch.cat([block.ids[:, :1], drafted], dim=1), proposal)

    def candidates(self, batch: ScheduleBatch, block: Block, plan: KVLocPlan) -> Candidates:
        """The drafter's most likely tokens; arguments as in `propose`."""
        forward_batch = self._forward_batch(batch, block, plan)
        with draft_tp_context(self._layout):
            output = self._runner.forward(forward_batch)
            if not output.can_run_graph:
                return self._tail.top(output.logits_output.hidden_states)
        ids, logits = self._tail.out
        bs = block.ids.shape[0]
        return Candidates(ids[:bs], logits[:bs])

    def _embed(self, ids: Tensor) -> Tensor:
        """Embeddings of the block [bs * block_size, hidden], by the verifier's table."""
        embeddings = self._embed_tokens(ids)  # [bs, block_size, hidden]
        if self._mask_embedding is not None:
            # Trained for the drafter alone: the verifier's table keeps its own row.
            embeddings[:, 1:] = self._mask_embedding
        if self._embedding_scale != 1.0:
            embeddings = embeddings * self._embedding_scale
        return embeddings.view(-1, embeddings.shape[-1])

    def _forward_batch(self, batch: ScheduleBatch, block: Block, plan: KVLocPlan) -> ForwardBatch:
        bs, num_tokens = block.ids.shape[0], block.ids.numel()
        seq_lens = batch.seq_lens
        seq_lens_cpu = host_block_lens(batch, self._block_size).to(torch.int32)
        translator = self._runner.kv_index_translator
        if self._window is not None:
            seq_lens, seq_lens_cpu = self._window.rebuild(batch, seq_lens_cpu)
            plan = plan.reads_from(
                translator,
                seq_lens=seq_lens,
                seq_lens_cpu=seq_lens_cpu,
                read_extent=self._block_size,
            )
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=bs,
            input_ids=block.ids.view(-1),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=seq_lens,
            out_cache_loc=block.slots.view(-1),
            seq_lens_sum=int(seq_lens_cpu.sum()),
            seq_lens_cpu=seq_lens_cpu,
            positions=block.positions.view(-1),
            input_embeds=self._embed(block.ids),
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=self._spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            num_token_non_padded=(
                torch.full((), num_tokens, dtype=torch.int32, device=block.ids.device)
                if enable_num_token_non_padded()
                else None
            ),
            global_num_token_non_padded_cpu=num_tokens,
            can_run_decode_cuda_graph=batch.can_run_decode_cuda_graph,
        )
        plan.bind(forward_batch, translator)
        return forward_batch
