"""Where an accepted run must stop because the prefix cache takes over a finished request's state.

Without buffers (`--mamba-radix-cache-strategy no_buffer`) the prefix cache is given the state that
a request ends with, and a state cannot be shortened like keys and values: SGLang leaves out that
of a request which ends inside an accepted run. A run that stops at the end leaves the state that
plain decoding would have left. Stopping earlier than the rule asks for is always exact.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

import torch
from dflash_kernels.types import Acceptance
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.runtime_context import get_exec, get_memory
from sglang.srt.utils.common import async_h2d
from torch import Tensor

from dflash_sglang.step.stop_ids import ending_ids, tokens_left

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

NO_TOKEN = -1


class RunEnds:
    """Stops runs where it matters; elsewhere an acceptance is left as it is."""

    def __init__(self, model_runner: ModelRunner) -> None:
        self._needed = (
            mambaish_config(model_runner.model_config) is not None
            and not get_memory().disable_radix_cache
            and not get_exec().mamba.enable_mamba_extra_buffer
        )

    def stop(self, batch: ScheduleBatch, accepted: Acceptance) -> Acceptance:
        """Each run cut behind its first stop token and at the length limit.

        Stop strings are found by the host, after the step: such a request's state is left out.

        Args:
            batch: decoding, without overlap: the host knows all that was said before this step.
            accepted: of the step.
        """
        width = accepted.output_ids.shape[1]
        if not self._needed or width == 1:  # a single token is never too many
            return accepted
        columns = list(zip_longest(*map(ending_ids, batch.reqs), fillvalue=NO_TOKEN))
        left = [tokens_left(req) for req in batch.reqs]
        device = accepted.output_ids.device
        most = async_h2d(left, dtype=torch.int32, device=device).clamp_(min=1, max=width)  # [bs]
        if columns:
            stops = async_h2d(columns, dtype=torch.int64, device=device)  # [most stop tokens, bs]
            most = torch.minimum(most, _through_first(accepted.output_ids, stops))
        return cut(accepted, most)


def cut(accepted: Acceptance, most: Tensor) -> Acceptance:
    """Commit no more than `most` tokens of each run, [bs] int32 from 1 on."""
    commit_len = torch.minimum(accepted.commit_len, most)
    last = (commit_len - 1).to(torch.int64)
    return accepted._replace(
        accept_len=commit_len - 1,
        commit_len=commit_len,
        bonus_ids=accepted.output_ids.gather(1, last[:, None])[:, 0],
        new_seq_lens=accepted.new_seq_lens - (accepted.commit_len - commit_len),
    )


def _through_first(output_ids: Tensor, stops: Tensor) -> Tensor:
    """Tokens of each row up to the first stop token with it, [bs] int32; the width without one."""
    width = output_ids.shape[1]
    is_stop = (output_ids[None] == stops[:, :, None]).any(dim=0)  # [bs, width]
    places = torch.arange(1, width + 1, dtype=torch.int32, device=output_ids.device)
    return torch.where(is_stop, places, width).amin(dim=1)
