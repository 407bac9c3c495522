"""Drafting: one forward pass of the block-diffusion model proposes a whole block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from dflash_kernels.prepare_block import Block
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    enable_num_token_non_padded,
)
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.draft_worker_common import (
    make_draft_block_spec_info,
    make_draft_sampler_capture_hook,
)
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import draft_tp_context
from torch import Tensor

from dflash_sglang.host.draft_state import host_block_lens
from dflash_sglang.host.draft_window import DraftWindow

if TYPE_CHECKING:
    from sglang.srt.configs.draft_parallel import DraftParallelLayout
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
    from sglang.srt.model_executor.model_runner import ModelRunner


class DraftTail:
    """Verifier head and argmax over the drafter's hidden states.

    Called by the draft CUDA graph through SGLang's capture-tail hook, it leaves the ids in
    `ids_out`, whose address the graph keeps; without a graph the worker calls `greedy_ids` itself.
    """

    def __init__(self, lm_head: Any, block_size: int, max_batch_size: int) -> None:
        self._head = lm_head
        self._block_size = block_size
        self._tp_group = get_parallel().tp_group
        shard = lm_head.shard_indices
        # Rows past num_org are padding or LoRA vocabulary: neither is ever drafted.
        self._num_ids: int = shard.num_org_elements
        self._first_id: int = shard.org_vocab_start_index
        device = next(lm_head.parameters()).device
        rows = max_batch_size * (block_size - 1)
        self.ids_out = torch.zeros(rows, dtype=torch.int64, device=device)

    def __call__(self, hidden: Tensor, input_ids: Tensor | None = None) -> None:
        """Write the ids of `hidden` to `ids_out`; the signature is the capture-tail hook's."""
        ids = self.greedy_ids(hidden)
        self.ids_out[: ids.shape[0]].copy_(ids)

    def greedy_ids(self, hidden: Tensor) -> Tensor:
        """Most likely token of every position after the anchor.

        Args:
            hidden: [bs * block_size, hidden] drafter output after its final norm.

        Returns:
            [bs * (block_size - 1)] int64. Ties go to the smallest id, on any number of ranks.
        """
        blocks = hidden.view(-1, self._block_size, hidden.shape[-1])
        drafted = blocks[:, 1:].reshape(-1, hidden.shape[-1])
        logits = self._head.quant_method.apply(self._head, drafted, None)[:, : self._num_ids]
        if self._tp_group.world_size == 1:
            return logits.argmax(dim=-1)
        best, index = logits.max(dim=-1)
        best_of_rank = self._tp_group.all_gather(best[None], dim=0)  # [ranks, rows]
        id_of_rank = self._tp_group.all_gather((index + self._first_id)[None], dim=0)
        rank = best_of_rank.argmax(dim=0, keepdim=True)  # ranks hold ascending id ranges
        return id_of_rank.gather(0, rank).squeeze(0)


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
        self._tail = DraftTail(lm_head, block_size, max_batch_size)
        self._spec_info = make_draft_block_spec_info(
            draft_token_num=block_size, device=draft_runner.device
        )

    def capture_tail(self) -> None:
        """Fold the head and the argmax into the draft CUDA graph; call before capture."""
        self._runner.capture_tail_hooks.append(make_draft_sampler_capture_hook(self._tail))

    @torch.inference_mode()
    def propose(self, batch: ScheduleBatch, block: Block, plan: KVLocPlan) -> Tensor:
        """Draft one block per request.

        Args:
            batch: the decode batch; `seq_lens` are the committed lengths.
            block: ids, positions and slots of the block.
            plan: the step's slot ids, shared with the verify.

        Returns:
            [bs, block_size] int64, column 0 the anchor.
        """
        forward_batch = self._forward_batch(batch, block, plan)
        with draft_tp_context(self._layout):
            output = self._runner.forward(forward_batch)
            hidden = output.logits_output.hidden_states
            if output.can_run_graph:
                drafted = self._tail.ids_out[: block.ids.shape[0] * (self._block_size - 1)]
            else:
                drafted = self._tail.greedy_ids(hidden)
        drafted = drafted.view(-1, self._block_size - 1)
        return torch.cat([block.ids[:, :1], drafted], dim=1)

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
