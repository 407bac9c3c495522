"""The recurrent layers of a hybrid verifier: their states follow what was accepted.

A verify runs the whole block behind the committed state without touching it. What is kept for the
commit is either the state after every token (SGLang's snapshots) or what each token changes (a
record, replayed): docs/method/recurrent-state.md. Either way the state in the pool is that of the
committed tokens as soon as the commit is done, so prefix cache, mixed batches, retraction and
narrower widths need no special case for speculation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.kernels.ops.attention.linear.gdn_replayssm_spec_decode import (
    commit_gdn_replayssm_circular,
    commit_gdn_replayssm_spec,
)
from sglang.kernels.ops.mamba.mamba_state_scatter_triton import fused_conv_window_scatter_with_mask
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.runtime_context import get_schedule
from sglang.srt.speculative.spec_utils import _verify_commit_step_indices
from torch import Tensor

from dflash_sglang.config import Rollback
from dflash_sglang.step.setup.width_runners import WidthRunners

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class Steps(NamedTuple):
    """Tokens of a block, counted from 0, whose states are wanted."""

    last: Tensor  # [bs], the last committed one
    tracked: Tensor | None  # [bs], the one at a tracking boundary, -1 for none; None: no tracking


def has_recurrent_layers(model_runner: ModelRunner) -> bool:
    """Whether a model has layers with a recurrent state."""
    return mambaish_config(model_runner.model_config) is not None


class RecurrentStates:
    """Moves the states of a verifier with recurrent layers on after a verify."""

    def __init__(self, model_runner: ModelRunner, runners: WidthRunners, block_size: int) -> None:
        self._model_runner = model_runner
        self._runners = runners
        self._block_size = block_size
        # SGLang describes an accepted path by places in the flat block: ours is a chain.
        requests = get_schedule().max_running_requests
        self._chain = torch.arange(requests * block_size, device=model_runner.device).view(
            requests, block_size
        )

    @property
    def rollback(self) -> Rollback:
        """Which way was chosen at start."""
        pool = self._model_runner.req_to_token_pool.mamba_pool
        return Rollback.REPLAY if pool.enable_linear_replayssm_spec else Rollback.SNAPSHOT

    def commit(self, batch: ScheduleBatch, width: int, commit_len: Tensor) -> None:
        """Commit what a verify at `width` has accepted.

        Args:
            batch: its `seq_lens` are those before the verify.
            width: of the verify.
            commit_len: [bs] int32, committed tokens of each request, from 1 on.
        """
        last, tracked = _verify_commit_step_indices(
            batch=batch,
            accept_index=self._chain[: len(commit_len)],
            accept_lens=commit_len,
            draft_token_num=self._block_size,
        )
        backend = self._runners.backend(width)
        # A gated delta net's ring; a Kimi delta attention's is folded by SGLang's own commit.
        if self._model_runner.req_to_token_pool.mamba_pool.replayssm_cache_base is not None:
            self._replay(batch, backend, commit_len, Steps(last, tracked))
        else:
            backend.update_mamba_state_after_mtp_verify(
                last_correct_step_indices=last,
                mamba_track_indices=batch.mamba_track_indices,
                mamba_steps_to_track=tracked,
                model=self._model_runner.model,
                req_pool_indices=batch.req_pool_indices,
            )

    def _replay(self, batch: ScheduleBatch, backend: Any, commit_len: Tensor, steps: Steps) -> None:
        """Apply the record of the accepted tokens to the states, in all layers at once.

        SGLang's ring could keep committed tokens for some steps. Folding them in at every commit
        leaves the ring empty, whatever the next verify's width is.
        """
        request_pool = self._model_runner.req_to_token_pool
        pool = request_pool.mamba_pool
        states = request_pool.get_speculative_mamba2_params_all_layers()
        # As the verify found them: the scheduler may have given the requests' rows to others since.
        slots = backend.linear_attn_backend.forward_metadata.mamba_cache_indices[: len(commit_len)]
        ring = {
            "replay_indices": batch.req_pool_indices,
            "write_pos": pool.replayssm_spec_write_pos,
            "cache_base": pool.replayssm_cache_base,
            "is_flush": pool.replayssm_is_flush,
            "null_block_id": -1,
        }
        length = states.replayssm_d.shape[-2]
        commit_gdn_replayssm_spec(
            num_accepted=commit_len,
            max_cache_len=length,
            max_spec_len=self._block_size,
            fold_every_commit=True,
            **ring,
        )
        commit_gdn_replayssm_circular(
            checkpoint_state=states.temporal,
            d_cache=states.replayssm_d,
            k_cache=states.replayssm_k,
            g_cache=states.replayssm_g,
            d_residual_cache=states.replayssm_rawv,
            k_residual_cache=states.replayssm_rawk,
            state_batch_indices=slots,
            accept_lens=commit_len,
            mamba_track_indices=batch.mamba_track_indices,
            mamba_steps_to_track=steps.tracked,
            **ring,
        )
        (conv,), (windows,) = states.conv, states.intermediate_conv_window
        fused_conv_window_scatter_with_mask(conv, windows, slots, steps.last)
        if batch.mamba_track_indices is not None:
            fused_conv_window_scatter_with_mask(
                conv, windows, batch.mamba_track_indices, steps.tracked
            )
