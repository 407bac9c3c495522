"""Seconds of draft and verify forwards on this machine, measured before serving."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from dflash_kernels.types import Block
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch import Tensor

from dflash_sglang.core.width import CostTable
from dflash_sglang.step.width_control import StepClock

if TYPE_CHECKING:
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
    from sglang.srt.model_executor.model_runner import ModelRunner

    from dflash_sglang.step.draft.drafter import Drafter
    from dflash_sglang.step.draft.narrowing import VerifyBound
    from dflash_sglang.step.setup.width_runners import WidthRunners

Cells = dict[tuple[int, int], float]  # seconds by (batch size, width)

BATCH_SIZES = (1, 4, 16, 64)
CONTEXT = 64  # tokens before the block
LONG_CONTEXT = 16384  # the same for what attention reads, as far as model and pool allow
REPEATS = 3  # and one to warm up
HEAD_START = 50_000_000  # cycles of the device, some 30 ms: launching the repeats takes less


class Calibration:
    """Runs forwards over dummy requests, before there are others.

    They read the KV pool as it is, and write its padding slot 0.
    """

    def __init__(
        self,
        model_runner: ModelRunner,
        drafter: Drafter,
        runners: WidthRunners,
        block_size: int,
        draft_range: int | None,
        bound: VerifyBound | None = None,
    ) -> None:
        """Nothing is measured yet.

        Args:
            model_runner: the verifier's.
            drafter: with every width that is to be measured.
            runners: likewise.
            block_size: tokens of a block, the anchor counted.
            draft_range: positions that the drafter was made for; None for all of the verifier's.
            bound: of a single request's verify; None where none is narrowed.
        """
        self._runner = model_runner
        self._drafter = drafter
        self._runners = runners
        self._block_size = block_size
        context = model_runner.model_config.context_len
        self._positions = context if draft_range is None else min(context, draft_range)
        self._bound = bound
        self._device = model_runner.device
        self._clock = StepClock(self._device)

    @torch.inference_mode()
    def measure(
        self,
        widths: Sequence[int],
        max_batch_size: int,
        largest_batch: Mapping[int, int] | None = None,
    ) -> CostTable:
        """Seconds of a draft and of a verify forward by batch size and width.

        Args:
            widths: to be measured.
            max_batch_size: the largest batch that will be served.
            largest_batch: the largest batch size at which a width will be used, of those that will
                not be used at any; 0 for one that will not be used at all.
        """
        limits = dict.fromkeys(widths, max_batch_size) | dict(largest_batch or {})
        reach = {width: min(limits[width], max_batch_size) for width in widths if limits[width]}
        sizes = {size for size in BATCH_SIZES if size < max_batch_size} | set(reach.values())
        draft: Cells = {}
        verify: Cells = {}
        for batch_size in sorted(sizes):
            used = [width for width in reach if batch_size <= reach[width]]
            self._measure_batch(batch_size, CONTEXT, used, draft, verify)
        draft_per_token: Cells = {}
        verify_per_token: Cells = {}
        # Attention reads as many times more as there are requests: two batch sizes tell.
        for batch_size in sorted({1, *reach.values()}):
            used = [width for width in reach if batch_size in (1, reach[width])]
            context = self._long_context(batch_size)
            if context is None:
                continue
            long_draft: Cells = {}
            long_verify: Cells = {}
            self._measure_batch(batch_size, context, used, long_draft, long_verify)
            for long, short, per_token in (
                (long_draft, draft, draft_per_token),
                (long_verify, verify, verify_per_token),
            ):
                more = context - CONTEXT
                per_token |= {cell: (long[cell] - short[cell]) / more for cell in long}
        bounded = None if self._bound is None else self._measure_bounded(reach, self._bound)
        self._runners.restore()
        return CostTable(
            draft,
            verify,
            draft_per_token=draft_per_token,
            verify_per_token=verify_per_token,
            context=CONTEXT,
            bounded=bounded,
        )

    def _measure_bounded(self, widths: Collection[int], bound: VerifyBound) -> Cells:
        """Seconds of one request's verify by (tokens that are routed to experts, width)."""
        seconds = {}
        batch, whole = self._batch(1, CONTEXT), self._block(1, CONTEXT)
        table = self._runner.req_to_token_pool.req_to_token
        self._spread(table, 1, CONTEXT)
        for width in sorted({*widths} - {1}):
            block = Block(*(columns[:, :width].contiguous() for columns in whole))
            verify = partial(self._verify, batch, block, self._plan(batch, block))
            self._runners.activate(width)
            for tokens in sorted({1, *widths}):
                if tokens <= width:
                    bound.hold(tokens)
                    (seconds[tokens, width],) = self._seconds([verify])
        table[1] = 0
        bound.hold(max(widths))
        return seconds

    def _measure_batch(
        self, batch_size: int, context: int, widths: Sequence[int], draft: Cells, verify: Cells
    ) -> None:
        """Add what forwards of a batch take at some widths, behind so many tokens of context."""
        batch, whole = self._batch(batch_size, context), self._block(batch_size, context)
        table = self._runner.req_to_token_pool.req_to_token
        self._spread(table, batch_size, context)
        for width in widths:
            block = Block(*(columns[:, :width].contiguous() for columns in whole))
            plan = self._plan(batch, block)
            runs: list[Callable[[], object]] = [partial(self._verify, batch, block, plan)]
            if width > 1:
                runs.insert(0, partial(self._drafter.candidates, batch, block, plan))
            self._runners.activate(width)
            *drafted, verify[batch_size, width] = self._seconds(runs)
            if drafted:
                (draft[batch_size, width],) = drafted
        table[1 : batch_size + 1] = 0

    def _long_context(self, batch_size: int) -> int | None:
        """The longest context that the models take and the pool holds for each request.

        None where no request gets much further than the short one: noise is all one would see.
        """
        held = min(
            LONG_CONTEXT,
            self._positions - 2 * self._block_size,
            self._runner.max_total_num_tokens // batch_size,
        )
        held -= held % self._runner.token_to_kv_pool_allocator.page_size
        return held if held >= 2 * CONTEXT else None

    def _spread(self, table: Tensor, batch_size: int, context: int) -> None:
        """Give each request slots of its own: of one slot, all reads would come from a cache."""
        if self._runner.kv_index_translator.is_translating:
            return  # a slot that was not allocated is in no pool
        page_size = self._runner.token_to_kv_pool_allocator.page_size
        tokens = torch.arange(batch_size * context, device=table.device)
        slots = page_size + tokens % self._runner.max_total_num_tokens
        table[1 : batch_size + 1, :context] = slots.view(batch_size, context).to(table.dtype)

    def _batch(self, batch_size: int, context: int) -> Any:
        """The members of a `ScheduleBatch` that the forwards read."""
        lens = torch.full((batch_size,), context, dtype=torch.int64)
        return SimpleNamespace(
            seq_lens=lens.to(self._device),
            seq_lens_cpu=lens,
            # Row 0 is for padding.
            req_pool_indices=torch.arange(1, batch_size + 1, device=self._device),
            can_run_decode_cuda_graph=True,
        )

    def _block(self, batch_size: int, context: int) -> Block:
        shape = (batch_size, self._block_size)
        # Different tokens: of one token, all would go to the same experts.
        ids = torch.randint(0, self._runner.model_config.vocab_size, shape, device=self._device)
        positions = context + torch.arange(self._block_size, device=self._device)
        return Block(
            ids=ids,
            positions=positions.expand(shape).contiguous(),
            slots=torch.zeros(shape, dtype=torch.int64, device=self._device),
        )

    def _plan(self, batch: Any, block: Block) -> KVLocPlan:
        return self._runner.kv_index_translator.plan(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            seq_lens_cpu=batch.seq_lens_cpu,
            write_virtual=block.slots.view(-1),
            read_extent=block.ids.shape[1],
        )

    def _verify(self, batch: Any, block: Block, plan: KVLocPlan) -> None:
        bs, width = block.ids.shape
        lens_cpu = batch.seq_lens_cpu + width
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=bs,
            input_ids=block.ids.view(-1),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            out_cache_loc=block.slots.view(-1),
            seq_lens_sum=int(lens_cpu.sum()),
            seq_lens_cpu=lens_cpu,
            positions=block.positions.view(-1),
            # Read instead of the above by models whose positions have three axes, alike for text.
            mrope_positions=block.positions.view(-1).expand(3, -1),
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=DFlashVerifyInput(
                draft_token=block.ids.view(-1),
                positions=block.positions.view(-1),
                draft_token_num=width,
                capture_hidden_mode=CaptureHiddenMode.FULL,
            ),
            capture_hidden_mode=CaptureHiddenMode.FULL,
            global_num_token_non_padded_cpu=bs * width,
            can_run_decode_cuda_graph=True,
        )
        plan.bind(forward_batch, self._runner.kv_index_translator)
        self._runner.forward(forward_batch)

    def _seconds(self, runs: Sequence[Callable[[], object]]) -> list[float]:
        """Median seconds of each of some forwards, run one after the other as a step does.

        On CUDA they are timed on the stream, where the host has been given a head start: under
        overlap it prepares a step while the device runs another.
        """
        for run in runs:
            run()
        device = torch.get_device_module(self._device)
        device.synchronize()
        if torch.device(self._device).type == "cuda":
            torch.cuda._sleep(HEAD_START)  # type: ignore[no-untyped-call]
        marks = [self._clock.mark()]
        for run in [*runs] * REPEATS:
            run()
            marks.append(self._clock.mark())
        device.synchronize()
        times = [self._clock.seconds(*pair) or 0.0 for pair in pairwise(marks)]
        return [statistics.median(times[place :: len(runs)]) for place in range(len(runs))]
