"""Where a request ends when a verify commits several tokens at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def finish_token_by_token(
    original: Callable[[Req, int], None], req: Req, new_accepted_len: int = 1
) -> None:
    """AROUND hook on `Req.update_finish_state`: look at an accepted run as plain decoding would.

    SGLang looks for stop strings in the whole run before it looks for stop tokens, so that a stop
    string behind an end-of-text token moves the end of the answer. Without stop strings or
    expressions there is nothing to confuse, and its own answer stands. Reasoning tokens past the
    end are not counted.

    Args:
        original: SGLang's method.
        req: its `output_ids` already hold the run.
        new_accepted_len: length of the run.
    """
    params = req.sampling_params
    if new_accepted_len > 1 and (params.stop_strs or params.stop_regex_strs):
        _look_at_each_token(original, req, new_accepted_len)
    else:
        original(req, new_accepted_len)
    if req.finished_len is not None:
        # Counted over the whole run, before its end was known; they are the first of the output.
        req.reasoning_tokens = min(req.reasoning_tokens, req.finished_len)


def _look_at_each_token(
    original: Callable[[Req, int], None], req: Req, new_accepted_len: int
) -> None:
    output_ids, grammar = req.output_ids, req.grammar
    end = len(output_ids)
    for length in range(end - new_accepted_len + 1, end + 1):
        req.output_ids = output_ids[:length]
        # The grammar has been advanced over the whole run: it may end the request at its end only.
        req.grammar = grammar if length == end else None
        original(req, 1)
        if req.finished():
            if req.finished_len is None:
                req.finished_len = length
            break
    req.output_ids, req.grammar = output_ids, grammar
