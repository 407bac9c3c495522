"""Verification: one forward of the verifier over the drafted blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from dflash_kernels.types import Acceptance, Block
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask
from torch import Tensor

from dflash_sglang.step.penalties import PenalisedRows, Penalties
from dflash_sglang.step.setup.width_runners import WidthRunners
from dflash_sglang.step.state import host_block_lens
from dflash_sglang.step.verifier_sampling import VerifierSampler

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan


class Verified(NamedTuple):
    """The verifier's output for a block of each request."""

    logits: Tensor  # [bs * width, vocab] float32, adjusted by the requests' rules
    features: Tensor  # [bs * width, taps * hidden], tapped hidden states of the block
    penalised: PenalisedRows | None  # requests with penalties
    logits_output: LogitsProcessorOutput
    forward_result: GenerationBatchResult


class StepOutput(NamedTuple):
    """What a decode step hands to the scheduler."""

    verified: Verified
    accepted: Acceptance
    forwards: int = 1  # of the verifier; above 1 in multi-step decoding


class Verifier:
    """Runs the verifier over `width` tokens per request and applies the requests' rules."""

    def __init__(
        self,
        target_worker: TpModelWorker,
        sampler: VerifierSampler,
        penalties: Penalties,
        runners: WidthRunners,
    ) -> None:
        self._worker = target_worker
        self._sampler = sampler
        self._penalties = penalties
        self._runners = runners

    def verify(
        self,
        batch: ScheduleBatch,
        block: Block,
        plan: KVLocPlan,
        grammar_barrier: Callable[[], None] | None,
    ) -> Verified:
        """Verify one block per request.

        Args:
            batch: the decode batch; its forward fields are overwritten (the scheduler restores
                them).
            block: the anchor in column 0 and the drafts behind it; positions and slots.
            plan: the block's slot ids.
            grammar_barrier: advances grammars over the previous step's tokens; None when they
                already are.
        """
        # Starts its copy to the host, so before the forward that hides it.
        grammar_tree = GrammarTree.from_linear_chain(block.ids) if batch.has_grammar else None
        forward_result = self._forward(batch, block, plan)
        logits_output = forward_result.logits_output
        logits = logits_output.next_token_logits
        grammar_mask = None
        if grammar_tree is not None:
            grammar_mask = build_grammar_vocab_mask(
                reqs=batch.reqs,
                tree=grammar_tree,
                sampling_info=batch.sampling_info,
                device=logits.device,
                barrier=grammar_barrier,
            )
        penalised = None
        if batch.sampling_info.acc_additive_penalties is not None:  # SGLang found some
            penalised = self._penalties.rows_of(batch)
        self._sampler.adjust(logits, batch, block.ids, penalised, grammar_mask)
        return Verified(
            logits=logits,
            features=logits_output.hidden_states,
            penalised=penalised,
            logits_output=logits_output,
            forward_result=forward_result,
        )

    def _forward(
        self, batch: ScheduleBatch, block: Block, plan: KVLocPlan
    ) -> GenerationBatchResult:
        width = block.ids.shape[1]
        verify_input = DFlashVerifyInput(
            draft_token=block.ids.view(-1),
            positions=block.positions.view(-1),
            draft_token_num=width,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            kv_loc_plan=plan,
        )
        batch.out_cache_loc = block.slots.view(-1)
        # Attention plans from host lengths that include the block.
        committed_cpu, committed_sum = batch.seq_lens_cpu, batch.seq_lens_sum
        batch.seq_lens_cpu = host_block_lens(batch, width)
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        self._runners.activate(width)
        # The forward plans attention itself, and without a graph it always does.
        forward_batch, _ = verify_input.prepare_for_verify(
            batch, self._worker, defer_metadata_init=True
        )
        batch.seq_lens_cpu, batch.seq_lens_sum = committed_cpu, committed_sum
        result = self._worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True
        )
        self._runners.restore()
        return result
