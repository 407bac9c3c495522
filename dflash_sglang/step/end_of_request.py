"""Where a request ends when several of its tokens are committed at once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch
from dflash_kernels.types import Acceptance
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.runtime_context import get_exec, get_memory
from sglang.srt.utils.common import async_h2d
from torch import Tensor

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

NO_TOKEN = -1


def stop_ids(req: Req) -> set[int]:
    """Stop and end-of-text tokens of a request, also where it ignores them.

    Source: `BatchedMinNewTokensPenalizer` in sglang/srt/sampling/penaltylib suppresses the same.
    """
    ids = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    tokenizer = req.tokenizer
    if tokenizer is not None:  # it is with --skip-tokenizer-init
        ids |= set(tokenizer.additional_stop_token_ids or ()) | {tokenizer.eos_token_id}
    return ids - {None}


def ending_ids(req: Req) -> set[int]:
    """The tokens that end a request: none with `ignore_eos`."""
    return set() if req.sampling_params.ignore_eos else stop_ids(req)


def tokens_left(req: Req) -> int:
    """Tokens until the length limit, counted from the output that the host has."""
    left: int = req.sampling_params.max_new_tokens - len(req.output_ids)
    return left


def truncate(accepted: Acceptance, most: Tensor) -> Acceptance:
    """Commit no more than `most` tokens of each request, [bs] int32 from 1 on."""
    commit_len = torch.minimum(accepted.commit_len, most)
    last = (commit_len - 1).to(torch.int64)
    return accepted._replace(
        accept_len=commit_len - 1,
        commit_len=commit_len,
        bonus_ids=accepted.output_ids.gather(1, last[:, None])[:, 0],
        new_seq_lens=accepted.new_seq_lens - (accepted.commit_len - commit_len),
    )


def caches_final_state(model_runner: ModelRunner) -> bool:
    """Whether the prefix cache takes over the recurrent state that a request ends with.

    It does without buffers (`--mamba-radix-cache-strategy no_buffer`). A state cannot be truncated
    like keys and values: SGLang does not cache that of a request which ends inside an accepted
    prefix. Truncated at the end (`truncate_at_end`), the state is the one of plain decoding.
    """
    return (
        mambaish_config(model_runner.model_config) is not None
        and not get_memory().disable_radix_cache
        and not get_exec().mamba.enable_mamba_extra_buffer
    )


def truncate_at_end(batch: ScheduleBatch, accepted: Acceptance) -> Acceptance:
    """Truncate behind the first stop token and at the length limit of each request.

    Stop strings are found by the host, after the step; the state of such a request is not cached.
    Accepting fewer drafts than the rule allows is always exact.

    Args:
        batch: decoding, without overlap: the host has all tokens committed before this step.
        accepted: of the step.
    """
    width = accepted.output_ids.shape[1]
    columns = list(zip_longest(*map(ending_ids, batch.reqs), fillvalue=NO_TOKEN))
    left = [tokens_left(req) for req in batch.reqs]
    device = accepted.output_ids.device
    most = async_h2d(left, dtype=torch.int32, device=device).clamp_(min=1, max=width)  # [bs]
    if columns:
        stops = async_h2d(columns, dtype=torch.int64, device=device)  # [most stop tokens, bs]
        most = torch.minimum(most, _through_first(accepted.output_ids, stops))
    return truncate(accepted, most)


def _through_first(output_ids: Tensor, stops: Tensor) -> Tensor:
    """Tokens of each row up to the first stop token with it, [bs] int32; the width without one."""
    width = output_ids.shape[1]
    is_stop = (output_ids[None] == stops[:, :, None]).any(dim=0)  # [bs, width]
    places = torch.arange(1, width + 1, dtype=torch.int32, device=output_ids.device)
    return torch.where(is_stop, places, width).amin(dim=1)


def finish_token_by_token(
    original: Callable[[Req, int], None], req: Req, new_accepted_len: int = 1
) -> None:
    """AROUND hook on `Req.update_finish_state`: find the end as plain decoding would.

    SGLang searches all new tokens for stop strings before it searches them for stop tokens, so that
    a stop string behind an end-of-text token moves the end of the answer. Without stop strings or
    regular expressions its own result is right. Reasoning tokens past the end are not counted.

    Args:
        original: SGLang's method.
        req: its `output_ids` already hold the new tokens.
        new_accepted_len: number of new tokens.
    """
    params = req.sampling_params
    if new_accepted_len > 1 and (params.stop_strs or params.stop_regex_strs):
        _check_each_token(original, req, new_accepted_len)
    else:
        original(req, new_accepted_len)
    if req.finished_len is not None:
        # Counted over all new tokens, before the end was known; they are the first of the output.
        req.reasoning_tokens = min(req.reasoning_tokens, req.finished_len)


def _check_each_token(
    original: Callable[[Req, int], None], req: Req, new_accepted_len: int
) -> None:
    output_ids, grammar = req.output_ids, req.grammar
    end = len(output_ids)
    for length in range(end - new_accepted_len + 1, end + 1):
        req.output_ids = output_ids[:length]
        # The grammar has been advanced over all new tokens: it can end the request at the last.
        req.grammar = grammar if length == end else None
        original(req, 1)
        if req.finished():
            if req.finished_len is None:
                req.finished_len = length
            break
    req.output_ids, req.grammar = output_ids, grammar
