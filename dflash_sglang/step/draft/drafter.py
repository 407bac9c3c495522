"""Drafting: one forward of the block-diffusion model proposes a whole block."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from dflash_kernels.types import Block, Proposal
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
from sglang.srt.speculative.spec_utils import draft_pp_context, draft_tp_context
from torch import Tensor

from dflash_sglang.core.sampled_draft import Candidates, sample_drafts
from dflash_sglang.step.draft.narrowing import VerifyBound
from dflash_sglang.step.draft.tail import DraftTail
from dflash_sglang.step.draft.window import DraftWindow
from dflash_sglang.step.setup.draft_attention import select_draft_backend
from dflash_sglang.step.setup.width_runners import WidthRunners
from dflash_sglang.step.state import host_block_lens

if TYPE_CHECKING:
    from sglang.srt.configs.draft_parallel import DraftParallelLayout
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput


class DraftSampling(NamedTuple):
    """How sampled drafts are drawn."""

    temperature: float  # above 0
    top_k: int  # tokens a position is drawn from


class WidthParts(NamedTuple):
    """What the drafter needs for blocks of one width."""

    tail: DraftTail
    spec_info: DFlashVerifyInput


class Draft(NamedTuple):
    """One drafted block a request."""

    ids: Tensor  # [bs, width] int64, column 0 the anchor
    proposal: Proposal | None  # what the drafts were drawn from; None: each is the most likely one
    limit: Tensor | None = None  # [bs] int32, drafts that are worth verifying; None for all


class Drafter:
    """Runs the draft model over one block per request."""

    def __init__(
        self,
        *,
        verifier_runner: ModelRunner,
        draft_runner: ModelRunner,
        layout: DraftParallelLayout,
        widths: Collection[int],
        max_batch_size: int,
        window: DraftWindow | None,
        mask_embedding: Tensor | None,
        sampling: DraftSampling | None,
        bound: VerifyBound | None,
    ) -> None:
        self._verifier_model = verifier_runner.model
        self._runner = draft_runner
        self._layout = layout
        self._window = window
        self._mask_embedding = mask_embedding
        self._embed_tokens = unwrap_lora_layer(self._verifier_model.get_input_embeddings())
        scale = getattr(self._verifier_model, "get_dflash_noise_embedding_scale", None)
        self._embedding_scale: float = 1.0 if scale is None else scale()
        lm_head = unwrap_lora_layer(self._verifier_model.lm_head)
        self._sampling = sampling
        self._bound = bound
        top_k = 1 if sampling is None else sampling.top_k
        self._by_width = {
            width: WidthParts(
                DraftTail(lm_head, width, max_batch_size, top_k, bound),
                make_draft_block_spec_info(draft_token_num=width, device=draft_runner.device),
            )
            for width in widths
        }
        self._width = max(widths)  # of the graph that is captured, or the forward that runs
        self._runners = WidthRunners(draft_runner, self._attention, on_activate=self._prepare)

    def capture_tail(self) -> None:
        """Fold the head and the argmax into the draft CUDA graphs; call before capture."""
        self._runner.capture_tail_hooks.append(make_draft_sampler_capture_hook(self._tail))

    def init_graphs(self, draft_worker: TpModelWorker, *, capture: bool) -> None:
        """Make the draft forward of whole blocks ready to run.

        Args:
            draft_worker: that has the drafter's attention backend for whole blocks.
            capture: whether to capture CUDA graphs.
        """
        with draft_pp_context(), draft_tp_context(self._layout):
            draft_worker.init_cuda_graphs(capture_decode_cuda_graph=capture)
        self._runners.adopt_block()

    def build(self, width: int, batch_sizes: Sequence[int] | None) -> None:
        """Make the draft forward of a width ready to run; arguments as of `WidthRunners.build`."""
        with draft_pp_context(), draft_tp_context(self._layout):
            self._runners.build(width, batch_sizes)

    def init_attention(self) -> None:
        """Take SGLang's attention backend, or ours in its place; call it once that is there."""
        self._runner.attn_backend = self._attention(self._runner.attn_backend, self._width)

    def _attention(self, backend: Any, width: int) -> Any:
        return select_draft_backend(self._runner, backend, width)

    def attn_backends(self) -> tuple[Any, ...]:
        """All attention backends of the drafter."""
        return self._runners.backends()

    def _prepare(self, width: int) -> None:
        if width != self._width:
            self._width = width
            # Convolutions along the block, where a drafter has them, are as long as the block.
            self._runner.model.set_block_size(width)

    def _tail(self, hidden: Tensor, input_ids: Tensor | None = None) -> None:
        self._by_width[self._width].tail(hidden, input_ids)

    @torch.inference_mode()
    def propose(
        self, batch: ScheduleBatch, block: Block, plan: KVLocPlan, uniforms: Tensor | None
    ) -> Draft:
        """Draft one block per request.

        Args:
            batch: the decode batch; `seq_lens` are the committed lengths.
            block: ids, positions and slots of the block, of one of the widths.
            plan: the step's slot ids, shared with the verify.
            uniforms: [bs, width - 1] float32 in [0, 1) to draw sampled drafts by; None to take the
                most likely token at every position.
        """
        candidates = self.candidates(batch, block, plan)
        drafted, proposal = candidates.ids[..., 0], None
        if uniforms is not None and self._sampling is not None:
            greedy = batch.sampling_info.top_ks <= 1
            drafted, proposal = sample_drafts(
                candidates, self._sampling.temperature, uniforms, greedy
            )
        limit = self._bound.limit if self._bound is not None and len(block.ids) == 1 else None
        return Draft(torch.cat([block.ids[:, :1], drafted], dim=1), proposal, limit)

    def candidates(self, batch: ScheduleBatch, block: Block, plan: KVLocPlan) -> Candidates:
        """The drafter's most likely tokens; arguments as in `propose`."""
        bs, width = block.ids.shape
        tail = self._by_width[width].tail
        self._runners.activate(width)
        forward_batch = self._forward_batch(batch, block, plan)
        with draft_tp_context(self._layout):
            output = self._runner.forward(forward_batch)
            if not output.can_run_graph:
                return tail.top(output.logits_output.hidden_states)
        return tail.kept(bs)

    def _embed(self, ids: Tensor) -> Tensor:
        """Embeddings of the block [bs * width, hidden], by the verifier's table."""
        embeddings = self._embed_tokens(ids)  # [bs, width, hidden]
        if self._mask_embedding is not None:
            # Trained for the drafter alone: the verifier's table keeps its own row.
            embeddings[:, 1:] = self._mask_embedding
        if self._embedding_scale != 1.0:
            embeddings = embeddings * self._embedding_scale
        return embeddings.view(-1, embeddings.shape[-1])

    def _forward_batch(self, batch: ScheduleBatch, block: Block, plan: KVLocPlan) -> ForwardBatch:
        (bs, width), num_tokens = block.ids.shape, block.ids.numel()
        seq_lens = batch.seq_lens
        seq_lens_cpu = host_block_lens(batch, width).to(torch.int32)
        translator = self._runner.kv_index_translator
        if self._window is not None:
            seq_lens, seq_lens_cpu = self._window.rebuild(batch, seq_lens_cpu, width)
            plan = plan.reads_from(
                translator,
                seq_lens=seq_lens,
                seq_lens_cpu=seq_lens_cpu,
                read_extent=width,
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
            spec_info=self._by_width[width].spec_info,
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
