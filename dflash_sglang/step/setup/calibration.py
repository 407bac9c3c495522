"""Seconds of draft and verify forwards on this machine, measured before serving."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
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

from dflash_sglang.core.width import CostTable

if TYPE_CHECKING:
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
    from sglang.srt.model_executor.model_runner import ModelRunner

    from dflash_sglang.step.draft.drafter import Drafter
    from dflash_sglang.step.setup.width_runners import WidthRunners

BATCH_SIZES = (1, 4, 16, 64)
CONTEXT = 64  # tokens before the block
REPEATS = 3  # and one to warm up


class Calibration:
    """Runs forwards over dummy requests that read and write the padding slot 0."""

    def __init__(
        self, model_runner: ModelRunner, drafter: Drafter, runners: WidthRunners, block_size: int
    ) -> None:
        self._runner = model_runner
        self._drafter = drafter
        self._runners = runners
        self._block_size = block_size
        self._device = model_runner.device

    @torch.inference_mode()
    def measure(self, widths: Sequence[int], max_batch_size: int) -> CostTable:
        """Seconds of a draft and of a verify forward by batch size and width.

        Args:
            widths: to be measured.
            max_batch_size: the largest batch that will be served.
        """
        draft: dict[tuple[int, int], float] = {}
        verify: dict[tuple[int, int], float] = {}
        smaller = (size for size in BATCH_SIZES if size < max_batch_size)
        for batch_size in (*smaller, max_batch_size):
            batch, whole = self._batch(batch_size), self._block(batch_size)
            for width in widths:
                block = Block(*(columns[:, :width].contiguous() for columns in whole))
                plan = self._plan(batch, block)
                if width > 1:
                    draft[batch_size, width] = self._seconds(
                        partial(self._drafter.candidates, batch, block, plan)
                    )
                self._runners.activate(width)
                verify[batch_size, width] = self._seconds(partial(self._verify, batch, block, plan))
        self._runners.restore()
        return CostTable(draft, verify)

    def _batch(self, batch_size: int) -> Any:
        """The members of a `ScheduleBatch` that the forwards read."""
        lens = torch.full((batch_size,), CONTEXT, dtype=torch.int64)
        return SimpleNamespace(
            seq_lens=lens.to(self._device),
            seq_lens_cpu=lens,
            req_pool_indices=torch.zeros(batch_size, dtype=torch.int64, device=self._device),
            can_run_decode_cuda_graph=True,
        )

    def _block(self, batch_size: int) -> Block:
        shape = (batch_size, self._block_size)
        # Different tokens: of one token, all would go to the same experts.
        ids = torch.randint(0, self._runner.model_config.vocab_size, shape, device=self._device)
        positions = CONTEXT + torch.arange(self._block_size, device=self._device)
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

    def _seconds(self, run: Callable[[], object]) -> float:
        times = []
        for _ in range(1 + REPEATS):
            begin = time.perf_counter()
            run()
            torch.get_device_module(self._device).synchronize()
            times.append(time.perf_counter() - begin)
        return statistics.median(times[1:])
