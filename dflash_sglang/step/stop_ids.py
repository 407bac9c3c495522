"""Where a request ends, as far as tokens and lengths say."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def stop_ids(req: Req) -> set[int]:
    """Its stop tokens and ends of text, also where it ignores them.

    Source: `BatchedMinNewTokensPenalizer` in sglang/srt/sampling/penaltylib holds back the same.
    """
    ids = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    tokenizer = req.tokenizer
    if tokenizer is not None:  # it is with --skip-tokenizer-init
        ids |= set(tokenizer.additional_stop_token_ids or ()) | {tokenizer.eos_token_id}
    return ids - {None}


def ending_ids(req: Req) -> set[int]:
    """Those that do end it: none where it ignores them."""
    return set() if req.sampling_params.ignore_eos else stop_ids(req)


def tokens_left(req: Req) -> int:
    """Tokens until the length limit, counted from what the host knows of it."""
    left: int = req.sampling_params.max_new_tokens - len(req.output_ids)
    return left
