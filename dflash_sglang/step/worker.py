"""The speculative worker: prefill, draft, verify, accept, commit."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from dflash_kernels.prepare_block import narrow_block, prepare_block
from dflash_kernels.types import Acceptance, Block, ServerShapes
from sglang.srt.environ import envs
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.platforms import current_platform
from sglang.srt.runtime_context import get_exec, get_parallel, get_schedule, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
from sglang.srt.speculative.draft_parallel import (
    model_draft_parallel_spec,
    resolve_draft_parallel_layout,
)
from sglang.srt.speculative.draft_worker_common import build_draft_tp_worker
from sglang.srt.speculative.spec_tp_sync import SpecTpSync, SpecTpSyncSite
from sglang.srt.speculative.spec_utils import draft_pp_context, draft_tp_context
from sglang.srt.utils.common import async_h2d
from torch import Tensor

from dflash_sglang.config import READY, read_settings
from dflash_sglang.core.accept import Rule
from dflash_sglang.step.accept import Acceptor, chosen_rule
from dflash_sglang.step.context_kv import ContextKV
from dflash_sglang.step.draft import Draft, Drafter, DraftSampling
from dflash_sglang.step.draft_limits import DraftLimits, draft_range
from dflash_sglang.step.draft_window import DraftWindow
from dflash_sglang.step.logit_processors import complete_mixed_outputs
from dflash_sglang.step.mask_embedding import load_mask_embedding
from dflash_sglang.step.multi_step import Ends, advance, joined
from dflash_sglang.step.penalties import PenalisedRows, Penalties
from dflash_sglang.step.recurrent_state import RecurrentStates
from dflash_sglang.step.run_ends import RunEnds
from dflash_sglang.step.setup.calibration import Calibration
from dflash_sglang.step.setup.op_self_test import op_shapes, prepare_ops
from dflash_sglang.step.setup.width_runners import WidthRunners
from dflash_sglang.step.state import DraftState, host_prefix_lens
from dflash_sglang.step.verifier_sampling import VerifierSampler
from dflash_sglang.step.verify import Verified, Verifier
from dflash_sglang.step.width_control import Choice, Widths

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

Publish = Callable[[Tensor], None]


class Pass(NamedTuple):
    """One pass of the verifier over decoding requests."""

    verified: Verified
    accepted: Acceptance


class DFlashWorker(BaseSpecWorker):
    """DFlash on SGLang's spec-v2 interface, for overlapped and synchronous scheduling alike.

    Invariant between steps: for every request, the verifier's and the drafter's KV cache hold
    exactly the positions below the committed length, at the same slots; the last committed token,
    the anchor, is in neither and opens the next block.

    Source: Chen et al., DFlash (arXiv 2602.06036), and the calls of
        sglang/srt/managers/scheduler.py.
    """

    def __init__(
        self,
        server_args: ServerArgs,
        gpu_id: int,
        nccl_port: int,
        target_worker: TpModelWorker,
    ) -> None:
        super().__init__()
        self._target_worker = target_worker
        self.model_runner = target_worker.model_runner
        self.device = target_worker.device
        self.block_size: int = get_spec().speculative_num_draft_tokens
        self.speculative_num_draft_tokens = self.block_size
        self.speculative_num_steps = 1
        self._tp_sync = SpecTpSync(get_parallel().tp_group)
        self._build_draft_worker(server_args, gpu_id, nccl_port)
        self._settings = settings = read_settings(get_spec().speculative_adaptive_config)
        self._rule = chosen_rule()
        prepare_ops(settings.ops, self.device, self._op_shapes())
        self._limits = DraftLimits(self.block_size, self._draft_range, self.device)
        self._context_kv = ContextKV(self._draft_runner, self.draft_parallel_layout)
        self._penalties = Penalties(self.model_runner.model_config.vocab_size, self.device)
        sampler = VerifierSampler(self.model_runner, self._penalties)
        self._widths = Widths(
            self.block_size, settings.width_settings(self.block_size), self._limits, self.device
        )
        self._width_runners = WidthRunners(self.model_runner, self._widths.ladder)
        self._recurrent = RecurrentStates(self.model_runner, self._width_runners, self.block_size)
        self._run_ends = RunEnds(self.model_runner)
        self._verifier = Verifier(target_worker, sampler, self._width_runners)
        self._acceptor = Acceptor(self._rule, sampler, self._tp_sync)
        self._drafter = self._make_drafter()
        if get_parallel().tp_rank == 0:
            logger.info(
                "%s: block_size=%d, mask_token_id=%d, draft_window_size=%s, accept_rule=%s, %s.",
                READY,
                self.block_size,
                self._mask_token_id,
                get_spec().speculative_draft_window_size,
                self._rule.value,
                self._settings,
            )

    def _op_shapes(self) -> ServerShapes:
        return op_shapes(
            self.block_size,
            self.model_runner.model_config.vocab_size,
            1 if self._rule is Rule.MATCH else self._settings.draft_top_k,
            self._draft_runner.model,
            self._draft_runner.kv_cache_dtype,
        )

    def _make_drafter(self) -> Drafter:
        sampling = DraftSampling(self._settings.draft_temperature, self._settings.draft_top_k)
        return Drafter(
            verifier_runner=self.model_runner,
            draft_runner=self._draft_runner,
            layout=self.draft_parallel_layout,
            widths={*self._widths.ladder, self.block_size} - {1},
            max_batch_size=get_schedule().max_running_requests,
            window=self._window,
            mask_embedding=load_mask_embedding(
                get_spec().speculative_draft_model_path, self._mask_token_id, self.device
            ),
            sampling=None if self._rule is Rule.MATCH else sampling,
        )

    def _build_draft_worker(self, server_args: ServerArgs, gpu_id: int, nccl_port: int) -> None:
        verifier_runner = self.model_runner
        draft_config = verifier_runner.spec_aux_config.draft_model_config
        self._draft_range = draft_range(draft_config.hf_config, verifier_runner.model_config)
        self.draft_parallel_layout = resolve_draft_parallel_layout(
            model_draft_parallel_spec(draft_config, spec_algorithm=verifier_runner.spec_algorithm),
            collapse_cp=True,
        )
        # SGLang refuses a drafter with a shorter context than the verifier's; ours is not asked
        # past its range.
        longer = envs.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN.override(True)
        with (
            contextlib.nullcontext() if self._draft_range is None else longer,
            draft_pp_context(),
            draft_tp_context(self.draft_parallel_layout),
        ):
            bundle = build_draft_tp_worker(
                server_args=server_args,
                gpu_id=gpu_id,
                nccl_port=nccl_port,
                target_model_config=verifier_runner.model_config,
                algo_label="DFLASH",
            )
        self._draft_worker = bundle.draft_worker
        self._draft_runner = bundle.draft_model_runner
        self._draft_runner.model.set_block_size(self.block_size)
        config = parse_dflash_draft_config(
            draft_hf_config=self._draft_runner.model_config.hf_config
        )
        self._mask_token_id: int = config.mask_token_id
        window_size = get_spec().speculative_draft_window_size
        self._window = (
            None
            if window_size is None
            else DraftWindow(window_size, get_schedule().page_size, self.block_size)
        )

    # ---- what the scheduler asks of a worker at start ------------------------------------------

    @property
    def spec_v2_attn_backends(self) -> tuple[Any, ...]:
        """Attention backends of a step; the scheduler asks them whether they need host lengths."""
        return (
            self.model_runner.attn_backend,
            *self._width_runners.backends(),
            *self._drafter.attn_backends(),
        )

    def internal_state(self) -> dict[str, Any]:
        """Effective settings and counters, for /get_server_info."""
        return {
            "accept_rule": self._rule.value,
            **dataclasses.asdict(self._settings),
            "steps_by_width": self._widths.steps_by_width(),
        }

    def weight_update_runners(self) -> list[tuple[str, Any]]:
        """(role, runner) pairs that weight updates apply to; asked for before each of them."""
        self._context_kv.weights_change()
        return [("draft", self._draft_runner)]

    def alloc_memory_pool(
        self,
        memory_pool_config: Any = None,
        req_to_token_pool: Any = None,
        token_to_kv_pool_allocator: Any = None,
    ) -> None:
        """Allocate the drafter's KV pool over the verifier's slots.

        With a window the drafter keeps a request-to-slot table of its own.
        """
        with draft_tp_context(self.draft_parallel_layout):
            self._draft_worker.alloc_memory_pool(
                memory_pool_config=memory_pool_config,
                req_to_token_pool=None if self._window is not None else req_to_token_pool,
                token_to_kv_pool_allocator=token_to_kv_pool_allocator,
            )
        if self._window is not None:
            self._window.bind(req_to_token_pool, self._draft_runner.req_to_token_pool)
        self._context_kv.bind()

    def init_attention_backends(self) -> None:
        """Create the drafter's attention backend."""
        with draft_pp_context(), draft_tp_context(self.draft_parallel_layout):
            self._draft_worker.init_attention_backends()
            self._drafter.init_attention()

    def init_cuda_graphs(self) -> None:
        """Make passes of every width ready, captured where the platform captures graphs."""
        capture = get_exec().graph.cuda_graph_config.decode.backend != Backend.DISABLED and not (
            current_platform.is_out_of_tree() and not current_platform.capabilities.graph_capture
        )
        if capture:
            self._drafter.capture_tail()
        self._drafter.init_graphs(self._draft_worker, capture=capture)
        self._width_runners.build(capture=capture)
        if self._widths.adaptive:
            self._calibrate()

    def _calibrate(self) -> None:
        begin = time.perf_counter()
        calibration = Calibration(
            self.model_runner, self._drafter, self._width_runners, self.block_size
        )
        costs = calibration.measure(self._widths.ladder, get_schedule().max_running_requests)
        self._widths.start(costs)
        logger.info(
            "DFLASH measured passes at widths %s in %.1f s: %s.",
            ", ".join(map(str, self._widths.ladder)),
            time.perf_counter() - begin,
            costs,
        )

    def on_verify_complete_cpu(
        self, num_correct_drafts_per_req: list[int], batch_size: int = 0
    ) -> None:
        """Accepted drafts of the oldest step that has not been reported, on the host."""
        self._widths.verified(num_correct_drafts_per_req)

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        """A request is done."""
        self._widths.finished(rid)

    # ---- one step ------------------------------------------------------------------------------

    def forward_batch_generation(
        self,
        batch: ScheduleBatch,
        on_publish: Publish | None = None,
        grammar_barrier: Callable[[], None] | None = None,
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

    def _prefill(
        self,
        batch: ScheduleBatch,
        on_publish: Publish | None,
        grammar_barrier: Callable[[], None] | None,
    ) -> GenerationBatchResult:
        """Run prompt tokens, and a mixed batch's decode rows, then give them to the drafter."""
        self._wait_for_fused_hicache_load(batch)
        self._widths.disturb()
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
        slots = plan.write_ids(self._draft_runner.kv_index_translator)
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

    def _decode(
        self,
        batch: ScheduleBatch,
        on_publish: Publish | None,
        grammar_barrier: Callable[[], None] | None,
    ) -> GenerationBatchResult:
        """Draft a block, verify it, commit what matches and the verifier's next token."""
        if batch.seq_lens.is_cuda:
            # Gathered on the scheduler's stream, read on this one.
            batch.seq_lens.record_stream(torch.cuda.current_stream())
        choice = self._widths.choose(batch)
        done = self._pass(batch, batch.spec_info.bonus_tokens, choice, on_publish, grammar_barrier)
        if choice.passes > 1:
            return self._run_on(batch, done, choice.passes)
        self._widths.ran()
        return self._result(done)

    def _pass(
        self,
        batch: ScheduleBatch,
        anchor_ids: Tensor,
        choice: Choice,
        on_publish: Publish | None = None,
        grammar_barrier: Callable[[], None] | None = None,
    ) -> Pass:
        block = self._next_block(batch, anchor_ids, choice.width)
        plan = self._plan_slots(batch, block)
        drafted = self._draft(batch, block, plan, choice)
        width = choice.width
        if drafted.confidences is not None:
            width = self._widths.narrow(drafted.confidences)
        block = narrow_block(block._replace(ids=drafted.ids), width)
        draft = drafted.cut_to(block.ids)
        if width < choice.width:
            plan = self._plan_slots(batch, block)  # its slots lie side by side again
        penalised = self._penalties.rows_of(batch)
        verified = self._verifier.verify(batch, block, plan, penalised, grammar_barrier)
        limits = None if width == 1 else self._limits.of(batch)  # without drafts, nothing to limit
        accepted = self._acceptor.accept(batch, draft, verified.logits, block.positions, limits)
        accepted = self._run_ends.stop(batch, accepted)
        if on_publish is not None:
            on_publish(accepted.new_seq_lens)
        self._commit(batch, block, plan, verified, accepted, penalised)
        return Pass(verified, accepted)

    def _run_on(self, batch: ScheduleBatch, first: Pass, most: int) -> GenerationBatchResult:
        """Go on token by token within the step, until requests end or `most` passes are done."""
        ends = Ends(batch, strict=self._recurrent.present)
        passes = [first]
        while not ends.reached(passes[-1].accepted, len(passes)) and len(passes) < most:
            last = passes[-1].accepted
            advance(batch, last)
            passes.append(self._pass(batch, last.bonus_ids, Choice(width=1)))
        self._widths.ran(len(passes))
        for req, tokens in zip(batch.reqs, ends.tokens, strict=True):
            req.spec_verify_ct += tokens - 1  # SGLang counts one a step
        result = self._result(passes[-1]._replace(accepted=joined([p.accepted for p in passes])))
        result.num_non_draft_tokens_per_req = len(passes)
        return result

    def _draft(self, batch: ScheduleBatch, block: Block, plan: KVLocPlan, choice: Choice) -> Draft:
        """The drafted block; where one token is verified nothing is drafted."""
        if choice.width == 1:
            return Draft(block.ids, None)
        self._context_kv.flush()
        if self._acceptor.samples_drafts(batch):
            uniforms = self._acceptor.uniforms(len(block.ids), choice.width - 1, block.ids.device)
            return self._drafter.propose(batch, block, plan, uniforms, confident=False)
        return self._drafter.propose(batch, block, plan, None, confident=choice.confident)

    def _next_block(self, batch: ScheduleBatch, anchor_ids: Tensor, block_size: int) -> Block:
        return prepare_block(
            anchor_ids,
            batch.seq_lens,
            batch.req_pool_indices,
            self.model_runner.req_to_token_pool.req_to_token,
            block_size=block_size,
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

    def _commit(
        self,
        batch: ScheduleBatch,
        block: Block,
        plan: KVLocPlan,
        verified: Verified,
        accepted: Acceptance,
        penalised: PenalisedRows | None,
    ) -> None:
        """Bring states and the drafter's cache up to the committed length; score what it holds."""
        self._recurrent.commit(batch, block.ids.shape[1], accepted.commit_len)
        if penalised is not None:
            self._penalties.commit(penalised, accepted)
        if batch.return_logprob:
            compute_spec_logprobs(
                batch,
                verified.logits_output,
                accepted.output_ids.reshape(-1),
                chain_stride=accepted.output_ids.shape[1],
            )
        append = self._context_kv.append
        if block.ids.shape[1] == 1:
            append = self._context_kv.append_later
        append(
            verified.features,
            plan.write_ids(self._draft_runner.kv_index_translator),
            block.positions.view(-1),
        )
        verified.logits_output.hidden_states = None  # else copied to the host

    def _result(self, done: Pass) -> GenerationBatchResult:
        verified, accepted = done
        forward = verified.forward_result
        return GenerationBatchResult(
            logits_output=verified.logits_output,
            next_token_ids=accepted.output_ids.reshape(-1),
            accept_lens=accepted.commit_len,
            new_seq_lens=accepted.new_seq_lens,
            next_draft_input=DraftState(
                bonus_tokens=accepted.bonus_ids, new_seq_lens=accepted.new_seq_lens
            ),
            speculative_num_draft_tokens=accepted.output_ids.shape[1],  # row stride of this step
            can_run_cuda_graph=forward.can_run_cuda_graph,
            routed_experts_output=forward.routed_experts_output,
            indexer_topk_output=forward.indexer_topk_output,
        )
