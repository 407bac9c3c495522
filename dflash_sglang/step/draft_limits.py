"""How many drafts each request may accept: some must advance one token a step to be exact."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.runtime_context import get_spec
from sglang.srt.utils.common import async_h2d
from torch import Tensor

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch


REQUEST_KEY = "dflash"  # in custom_params of a request's sampling parameters


class DraftLimits:
    """Finds the requests that speculation cannot serve, or not at every position."""

    def __init__(
        self, block_size: int, draft_range: int | None, device: torch.device | str
    ) -> None:
        """Makes the limits of a server.

        Args:
            block_size: D, the anchor included.
            draft_range: positions the drafter can tell apart; None if no request gets past them.
            device: of the limits.
        """
        self._full = block_size - 1
        self._range = draft_range
        self._device = device

    def of(self, batch: ScheduleBatch) -> Tensor | None:
        """Most drafts of each request, [bs] int32; None when all may accept a whole block."""
        known = [self._drafts(req) for req in batch.reqs]
        if self._range is None and min(known) == self._full:
            return None
        drafts = async_h2d(known, dtype=torch.int32, device=self._device)
        if self._range is not None:
            past = batch.seq_lens + self._full >= self._range
            drafts = drafts.masked_fill_(past, 0)
        return drafts

    def most(self, req: Req) -> int | None:
        """As `most_tokens`, and 1 for a request that has passed the range, as the host knows it."""
        if self._range is not None:
            known = len(req.origin_input_ids) + len(req.output_ids)  # the anchor's position, plus 1
            if known + self._full > self._range:
                return 1
        return most_tokens(req)

    def _drafts(self, req: Req) -> int:
        most = most_tokens(req)
        return self._full if most is None else min(most - 1, self._full)


def most_tokens(req: Req) -> int | None:
    """Most tokens that a request may commit in a step, 1 for no speculation; None for no limit.

    A custom logit processor may read the output so far and keep state, so it is called once per
    committed token, as without speculation. The rest is the request's own wish.
    """
    if req.custom_logit_processor is not None:
        return 1
    wishes = (req.sampling_params.custom_params or {}).get(REQUEST_KEY)
    if wishes is None:
        return None
    return 1 if not wishes.get("speculative", True) else wishes.get("max_width")


def wish_problem(custom_params: Mapping[str, Any] | None) -> str | None:
    """What is wrong with a request's wishes, None when nothing is.

    Args:
        custom_params: of the request's sampling parameters.
    """
    wishes = (custom_params or {}).get(REQUEST_KEY)
    if wishes is None:
        return None
    if not isinstance(wishes, dict) or not set(wishes) <= {"max_width", "speculative"}:
        given = wishes
    elif not isinstance(wishes.get("speculative", True), bool):
        given = wishes["speculative"]
    elif type(wishes.get("max_width", 1)) is not int or wishes.get("max_width", 1) < 1:
        given = wishes["max_width"]
    else:
        return None
    return (
        f"custom_params[{REQUEST_KEY!r}] has {given!r}. Give an object with "
        '"max_width", an integer from 1 on, and "speculative", true or false; each may be left out.'
    )


def draft_range(draft_config: Any, verifier_config: ModelConfig) -> int | None:
    """Positions the drafter was made for; None when no request can get past them.

    Args:
        draft_config: the drafter's own config.json.
        verifier_config: SGLang's view of the verifier.
    """
    positions: int | None = getattr(draft_config, "max_position_embeddings", None)
    # The last block of a request reaches past the context by its rejected drafts.
    reached = verifier_config.context_len + get_spec().speculative_num_draft_tokens
    return None if positions is None or positions >= reached else positions
