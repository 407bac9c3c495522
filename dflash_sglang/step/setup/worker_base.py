"""Everything of the worker but its steps: construction, memory pools, graphs, counters."""

from __future__ import annotations

import dataclasses
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.platforms import current_platform
from sglang.srt.runtime_context import get_exec, get_lora, get_parallel, get_schedule, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.spec_tp_sync import SpecTpSync
from sglang.srt.speculative.spec_utils import draft_pp_context, draft_tp_context
from sglang.srt.utils import get_cuda_graph_max_batch_size

from dflash_sglang.config import READY, OpsChoice, Settings, read_settings
from dflash_sglang.core.accept import Rule
from dflash_sglang.step.accept import Acceptor, chosen_rule
from dflash_sglang.step.batch_facts import CommitLimits, RunningBatch
from dflash_sglang.step.context_kv import ContextKV
from dflash_sglang.step.draft.drafter import Drafter, DraftSampling
from dflash_sglang.step.draft.narrowing import VerifyBound, bound_experts
from dflash_sglang.step.end_of_request import caches_final_state
from dflash_sglang.step.multi_step import MultiStep
from dflash_sglang.step.penalties import Penalties
from dflash_sglang.step.recurrent_state import RecurrentStates, has_recurrent_layers
from dflash_sglang.step.setup.calibration import Calibration
from dflash_sglang.step.setup.draft_model import DraftModel, build_draft_model
from dflash_sglang.step.setup.mask_embedding import load_mask_embedding
from dflash_sglang.step.setup.narrowing import narrowing_problem
from dflash_sglang.step.setup.op_self_test import op_shapes, prepare_ops, watch_compiles
from dflash_sglang.step.setup.width_capture import (
    LEAST_FREE_DRAFT_GB,
    build_widths,
    free_memory_gb,
    without_gathers,
)
from dflash_sglang.step.setup.width_runners import WidthRunners
from dflash_sglang.step.verifier_sampling import VerifierSampler
from dflash_sglang.step.verify import Verifier
from dflash_sglang.step.width_control import WidthController

if TYPE_CHECKING:
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)


class WorkerBase(BaseSpecWorker):
    """The parts of a step, and the interface that the scheduler uses at start.

    Source: the calls of sglang/srt/managers/scheduler.py and
        sglang/srt/speculative/base_spec_worker.py.
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
        self._settings = settings = read_settings(
            get_spec().speculative_adaptive_config, lora=bool(get_lora().enable_lora)
        )
        self._rule = chosen_rule()
        draft_model = build_draft_model(
            server_args, gpu_id, nccl_port, self.model_runner, self.block_size
        )
        self._draft_worker = draft_model.worker
        self._draft_runner = draft_model.runner
        self._window = draft_model.window
        self._mask_token_id = draft_model.mask_token_id
        self._draft_range = draft_model.range
        self.draft_parallel_layout = draft_model.layout  # read by SGLang's scheduler
        vocab_size = self.model_runner.model_config.vocab_size
        shapes = op_shapes(
            settings.width_settings(self.block_size).ladder(self.block_size),
            vocab_size,
            unwrap_lora_layer(self.model_runner.model.lm_head),
            1 if self._rule is Rule.MATCH else settings.draft_top_k,
            self._draft_runner.model,
            self._draft_runner.kv_cache_dtype,
            self._rule,
        )
        prepare_ops(settings.ops, self.device, shapes)
        self._running = RunningBatch(self.block_size, self.device)
        self._limits = CommitLimits(self.block_size, draft_model.range)
        self._context_kv = ContextKV(self._draft_runner, draft_model.layout)
        self._penalties = Penalties(vocab_size, self.device)
        width_settings = without_gathers(settings).width_settings(self.block_size)
        self._bound = self._make_bound(width_settings.ladder(self.block_size))
        self._widths = WidthController(self.block_size, width_settings, self.device, self._bound)
        self._width_runners = WidthRunners(self.model_runner)
        self._recurrent: RecurrentStates | None = None
        if has_recurrent_layers(self.model_runner):
            self._recurrent = RecurrentStates(
                self.model_runner, self._width_runners, self.block_size
            )
        self._truncates_at_end = caches_final_state(self.model_runner)
        self._multi_step = MultiStep(recurrent=self._recurrent is not None)
        sampler = VerifierSampler(self.model_runner, self._penalties)
        self._verifier = Verifier(target_worker, sampler, self._penalties, self._width_runners)
        self._acceptor = Acceptor(self._rule, sampler, self._running, self._tp_sync)
        self._drafter = self._make_drafter(settings, draft_model)
        if get_parallel().tp_rank == 0:
            logger.info(
                "%s: block_size=%d, mask_token_id=%d, draft_window_size=%s, accept_rule=%s, %s.",
                READY,
                self.block_size,
                self._mask_token_id,
                get_spec().speculative_draft_window_size,
                self._rule.value,
                settings,
            )
            if get_lora().enable_lora:
                logger.info("DFLASH verifies whole blocks in every step: LoRA is on.")

    def _make_bound(self, ladder: tuple[int, ...]) -> VerifyBound | None:
        """Narrow a single request's verify where that is possible, before anything is captured."""
        if not self._settings.narrow:
            problem: str | None = "by the settings"
        elif len(ladder) == 1:
            problem = "the width is fixed"
        elif self._settings.ops is OpsChoice.REFERENCE and torch.device(self.device).type != "cpu":
            problem = "the torch reference of the op that bounds them reads the device"
        else:
            problem = narrowing_problem(self.model_runner, self._rule, capture=captures_graphs())
        if get_parallel().tp_rank == 0:
            logger.info(
                "DFLASH verifies a single request's drafts %s.",
                "as far as they are worth it" if problem is None else f"all: {problem}",
            )
        if problem is not None:
            return None
        bound = VerifyBound([width for width in ladder if width > 1], self.device)
        bound_experts(bound)
        return bound

    def _make_drafter(self, settings: Settings, draft_model: DraftModel) -> Drafter:
        sampling = DraftSampling(settings.draft_temperature, settings.draft_top_k)
        return Drafter(
            verifier_runner=self.model_runner,
            draft_runner=draft_model.runner,
            layout=draft_model.layout,
            widths={*self._widths.ladder, self.block_size} - {1},
            # The number asked for: the pools may hold fewer, and graphs are padded to it.
            max_batch_size=get_cuda_graph_max_batch_size(get_schedule().max_running_requests),
            window=draft_model.window,
            mask_embedding=load_mask_embedding(
                get_spec().speculative_draft_model_path, draft_model.mask_token_id, self.device
            ),
            sampling=None if self._rule is Rule.MATCH else sampling,
            bound=self._bound,
        )

    @property
    def spec_v2_attn_backends(self) -> tuple[Any, ...]:
        """Attention backends of a step; the scheduler reads whether they need host lengths."""
        return (
            self.model_runner.attn_backend,
            *self._width_runners.backends(),
            *self._drafter.attn_backends(),
        )

    def internal_state(self) -> dict[str, Any]:
        """Effective settings and counters, for /get_server_info."""
        chosen = {} if self._recurrent is None else {"rollback": self._recurrent.rollback}
        return {
            "accept_rule": self._rule.value,
            **dataclasses.asdict(self._settings),
            **chosen,
            "steps_by_width": self._widths.forwards_by_width(),
            "narrowed": self._widths.narrowed(),
        }

    def weight_update_runners(self) -> list[tuple[str, Any]]:
        """(role, runner) pairs that weight updates apply to; called before each of them."""
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
        """Make forwards of every width ready, captured where the platform captures graphs."""
        capture = captures_graphs()
        draft_capture = capture and self._fits_draft_graphs()
        if draft_capture:
            self._drafter.capture_tail()
        self._drafter.init_graphs(self._draft_worker, capture=draft_capture)
        self._width_runners.adopt_block()
        built = build_widths(
            self._widths.ladder,
            self._drafter,
            self._width_runners,
            block_size=self.block_size,
            narrow_max_bs=self._settings.narrow_cuda_graph_max_bs,
            free_gb=partial(free_memory_gb, self.model_runner),
        )
        # Beside what SGLang reports for the graphs that it captured.
        self._additional_graph_memory_usage = {"target_verify": built.memory_gb}
        self._additional_graph_time_usage = {"target_verify": built.seconds}
        if self._widths.adaptive:
            self._calibrate(built.largest_batch)
        watch_compiles(self.device)

    def _fits_draft_graphs(self) -> bool:
        """Whether memory is left for the drafter's graphs, by SGLang's own measure."""
        free = free_memory_gb(self.model_runner)
        if free < LEAST_FREE_DRAFT_GB:
            logger.warning(
                "DFLASH drafts without CUDA graphs: %.2f GB of memory are free, and %.0f GB are "
                "kept. Lower --mem-fraction-static.",
                free,
                LEAST_FREE_DRAFT_GB,
            )
        return free >= LEAST_FREE_DRAFT_GB

    def _calibrate(self, largest_batch: dict[int, int]) -> None:
        begin = time.perf_counter()
        calibration = Calibration(
            self.model_runner,
            self._drafter,
            self._width_runners,
            self.block_size,
            self._draft_range,
            self._bound,
        )
        costs = calibration.measure(self._widths.ladder, self._largest_batch(), largest_batch)
        self._widths.start(costs, largest_batch)
        logger.info(
            "DFLASH measured forwards at widths %s in %.1f s: %s.",
            ", ".join(map(str, self._widths.ladder)),
            time.perf_counter() - begin,
            costs,
        )

    def _largest_batch(self) -> int:
        """The largest batch that the pools hold, and that has graphs where there are any."""
        # SGLang lowers the requested number on the model runner, to what the pools hold.
        held = int(self.model_runner.max_running_requests)
        captured = self._width_runners.captured(self.block_size)
        return min(held, captured[-1]) if captured else held


def captures_graphs() -> bool:
    """Whether forwards are captured as CUDA graphs."""
    decode = get_exec().graph.cuda_graph_config.decode
    return decode.backend != Backend.DISABLED and not (
        current_platform.is_out_of_tree() and not current_platform.capabilities.graph_capture
    )
