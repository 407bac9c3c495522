"""One step of the scheduler: prefill, or draft, verify, accept and commit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from dflash_kernels.prepare_block import prepare_block
from dflash_kernels.types import Acceptance, Block
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite
from sglang.srt.utils.common import async_h2d
from torch import Tensor

from dflash_sglang.step.batch_facts import strictest
from dflash_sglang.step.end_of_request import truncate_at_end
from dflash_sglang.step.setup.worker_base import WorkerBase
from dflash_sglang.step.state import DraftState, host_prefix_lens, mean_prefix_len
from dflash_sglang.step.verifier_sampling import complete_mixed_outputs
from dflash_sglang.step.verify import StepOutput, Verified

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan

Publish = Callable[[Tensor], None]
Barrier = Callable[[], None]


class DFlashWorker(WorkerBase):
    """DFlash on SGLang's spec-v2 interface, for overlapped and synchronous scheduling alike.

    Invariant between steps: for every request, the verifier's and the drafter's KV cache hold
    exactly the positions below the committed length, at the same slots; the last committed token,
    the anchor, is in neither and opens the next block.

    Source: Chen et al., DFlash (arXiv 2602.06036), and the calls of
        sglang/srt/managers/scheduler.py.
    """

    def forward_batch_generation(
        self,
        batch: ScheduleBatch,
        on_publish: Publish | None = None,
        grammar_barrier: Barrier | None = None,
        pp_proxy_tensors: Any = None,
    ) -> GenerationBatchResult:
        """Run one step of the scheduler.

        Args:
            batch: extend, mixed, decode or idle.
            on_publish: called with the new committed lengths [bs] as soon as they are known.
            grammar_barrier: advances grammars over the previous step's tokens (overlap only).
            pp_proxy_tensors: unused; pipeline parallelism is refused at start.
        """
        if batch.forward_mode.is_extend():
            return self._prefill(batch, on_publish, grammar_barrier)
        if batch.forward_mode.is_idle():
            return self._idle(on_publish)
        return self._decode(batch, on_publish, grammar_barrier)

    # ---- decode --------------------------------------------------------------------------------

    def _decode(
        self, batch: ScheduleBatch, on_publish: Publish | None, grammar_barrier: Barrier | None
    ) -> GenerationBatchResult:
        """Choose a width; then draft and verify a block, or decode a token without a draft."""
        if batch.seq_lens.is_cuda:
            # Gathered on the scheduler's stream, read on this one.
            batch.seq_lens.record_stream(torch.cuda.current_stream())
        facts = self._running.facts(batch)
        step = self._widths.begin(facts.keys, mean_prefix_len(batch))
        self._widths.learn()
        width = self._widths.choose(step, self._limits.of(batch, facts))
        if width > 1:
            limit = self._limits.on_device(batch, facts)
            output = self._speculate(batch, width, limit, on_publish, grammar_barrier)
        else:
            anchor_ids = batch.spec_info.bonus_tokens
            output = self._decode_token(batch, anchor_ids, on_publish, grammar_barrier)
            output = self._multi_step.extend(batch, output, step.most_forwards, self._decode_token)
        self._widths.end(step, output.forwards)
        return self._result(output)

    def _speculate(
        self,
        batch: ScheduleBatch,
        width: int,
        limit: Tensor | None,
        on_publish: Publish | None,
        grammar_barrier: Barrier | None,
    ) -> StepOutput:
        """Draft a block, verify it, commit the accepted drafts and the verifier's next token."""
        block = self._prepare_block(batch, batch.spec_info.bonus_tokens, width)
        plan = self._plan_slots(batch, block)
        self._context_kv.flush()
        uniforms = self._acceptor.draft_uniforms(batch, block)
        draft = self._drafter.propose(batch, block, plan, uniforms)
        limit = strictest(limit, draft.limit)
        block = block._replace(ids=draft.ids)
        verified = self._verifier.verify(batch, block, plan, grammar_barrier)
        accepted = self._acceptor.accept(batch, draft, verified.logits, block.positions, limit)
        if self._truncates_at_end:
            accepted = truncate_at_end(batch, accepted)
        if on_publish is not None:
            on_publish(accepted.new_seq_lens)
        self._commit(batch, block, verified, accepted)
        self._context_kv.append(
            verified.features, self._draft_slots(plan), block.positions.view(-1)
        )
        return StepOutput(verified, accepted)

    def _decode_token(
        self,
        batch: ScheduleBatch,
        anchor_ids: Tensor,
        on_publish: Publish | None = None,
        grammar_barrier: Barrier | None = None,
    ) -> StepOutput:
        """Decode the token behind each anchor, [bs] int64, without a draft."""
        anchor = self._prepare_block(batch, anchor_ids, 1)
        plan = self._plan_slots(batch, anchor)
        verified = self._verifier.verify(batch, anchor, plan, grammar_barrier)
        accepted = self._acceptor.next_token(batch, anchor, verified.logits)
        if on_publish is not None:
            on_publish(accepted.new_seq_lens)
        self._commit(batch, anchor, verified, accepted)
        # Nothing reads the drafter's cache before the next draft.
        self._context_kv.append_later(
            verified.features, self._draft_slots(plan), anchor.positions.view(-1), batch.reqs
        )
        return StepOutput(verified, accepted)

    def _prepare_block(self, batch: ScheduleBatch, anchor_ids: Tensor, width: int) -> Block:
        return prepare_block(
            anchor_ids,
            batch.seq_lens,
            batch.req_pool_indices,
            self.model_runner.req_to_token_pool.req_to_token,
            block_size=width,
            mask_token_id=self._mask_token_id,
        )

    def _plan_slots(self, batch: ScheduleBatch, block: Block) -> KVLocPlan:
        """Slot ids of a block, which draft, verify and context KV all write."""
        return self.model_runner.kv_index_translator.plan(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            seq_lens_cpu=host_prefix_lens(batch),
            write_virtual=block.slots.view(-1),
            read_extent=block.ids.shape[1],
        )

    def _draft_slots(self, plan: KVLocPlan) -> Tensor:
        """The planned slots as ids in the drafter's pool, [tokens] int64."""
        return plan.write_ids(self._draft_runner.kv_index_translator)

    def _commit(
        self, batch: ScheduleBatch, block: Block, verified: Verified, accepted: Acceptance
    ) -> None:
        """Move recurrent states and penalties on to the committed length; score its tokens."""
        if self._recurrent is not None:
            self._recurrent.commit(batch, block.ids.shape[1], accepted.commit_len)
        if verified.penalised is not None:
            self._penalties.commit(verified.penalised, accepted)
        if batch.return_logprob:
            compute_spec_logprobs(
                batch,
                verified.logits_output,
                accepted.output_ids.reshape(-1),
                chain_stride=accepted.output_ids.shape[1],
            )
        verified.logits_output.hidden_states = None  # else copied to the host

    def _result(self, output: StepOutput) -> GenerationBatchResult:
        verified, accepted, forwards = output
        forward = verified.forward_result
        return GenerationBatchResult(
            logits_output=verified.logits_output,
            next_token_ids=accepted.output_ids.reshape(-1),
            accept_lens=accepted.commit_len,
            new_seq_lens=accepted.new_seq_lens,
            next_draft_input=DraftState(
                bonus_tokens=accepted.bonus_ids, new_seq_lens=accepted.new_seq_lens
            ),
            num_non_draft_tokens_per_req=forwards,
            speculative_num_draft_tokens=accepted.output_ids.shape[1],  # row stride of this step
            can_run_cuda_graph=forward.can_run_cuda_graph,
            routed_experts_output=forward.routed_experts_output,
            indexer_topk_output=forward.indexer_topk_output,
        )

    def on_verify_complete_cpu(
        self, num_correct_drafts_per_req: list[int], batch_size: int = 0
    ) -> None:
        """Accepted drafts of the oldest decode step that has not been reported, on the host."""
        self._widths.report_acceptance(num_correct_drafts_per_req)

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        """A request is done."""
        self._widths.forget(rid)
        self._running.forget()

    # ---- prefill and idle ----------------------------------------------------------------------

    def _prefill(
        self, batch: ScheduleBatch, on_publish: Publish | None, grammar_barrier: Barrier | None
    ) -> GenerationBatchResult:
        """Run prompt tokens, and a mixed batch's decode rows, then give them to the drafter."""
        self._wait_for_fused_hicache_load(batch)
        self._widths.interrupt()
        if batch.has_grammar and batch.forward_mode.is_mixed() and grammar_barrier is not None:
            # The ordinary sampler masks the decode rows by their grammars as they stand.
            grammar_barrier()
        penalised = self._penalties.prepare_prefill(batch)
        with complete_mixed_outputs(batch):
            result = self._target_worker.forward_batch_generation(
                batch, capture_hidden_mode=CaptureHiddenMode.FULL, return_kv_loc_plan=True
            )
        plan, result.kv_loc_plan = result.kv_loc_plan, None
        self._tp_sync.sync(SpecTpSyncSite.DFLASH_TARGET, result.next_token_ids)
        if penalised is not None:
            self._penalties.commit_prefill(penalised, result.next_token_ids)
        result.new_seq_lens = batch.seq_lens
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        # Before the scheduler can put the prefix into the radix tree: a hit must find draft KV too.
        slots = self._draft_slots(plan)
        self._context_kv.append(
            result.logits_output.hidden_states[: slots.shape[0]],  # less the padding rows
            slots,
            self._extend_positions(batch),
        )
        result.logits_output.hidden_states = None  # else copied to the host
        result.next_draft_input = DraftState(
            bonus_tokens=result.next_token_ids.to(torch.int64), new_seq_lens=batch.seq_lens
        )
        return result

    def _extend_positions(self, batch: ScheduleBatch) -> Tensor:
        """Absolute positions of an extend batch's tokens, [tokens] int64."""
        spans = zip(batch.prefix_lens, batch.extend_lens, strict=True)
        positions = list(chain.from_iterable(range(start, start + n) for start, n in spans))
        return async_h2d(positions, dtype=torch.int64, device=self.device)

    def _idle(self, on_publish: Publish | None) -> GenerationBatchResult:
        state = DraftState.empty(self.device)
        if on_publish is not None:
            on_publish(state.new_seq_lens)
        return GenerationBatchResult(
            next_token_ids=state.bonus_tokens,
            accept_lens=state.bonus_tokens.to(torch.int32),
            new_seq_lens=state.new_seq_lens,
            next_draft_input=state,
            speculative_num_draft_tokens=self.block_size,
        )
