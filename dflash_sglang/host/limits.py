"""How many drafts each request may accept: some must advance one token a step to be exact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.runtime_context import get_spec
from sglang.srt.utils.common import async_h2d
from torch import Tensor

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch


class Limits(NamedTuple):
    """Most drafts that the requests of a batch may accept."""

    drafts: Tensor  # [bs] int32, 0 .. block_size - 1
    most: int  # the largest of them that the host knows of


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

    def of(self, batch: ScheduleBatch) -> Limits | None:
        """The batch's limits; None when every request may accept a whole block."""
        known = [self._full if may_speculate(req) else 0 for req in batch.reqs]
        most = max(known)
        if self._range is None and min(known) == self._full:
            return None
        drafts = async_h2d(known, dtype=torch.int32, device=self._device)
        if self._range is not None:
            past = batch.seq_lens + self._full >= self._range
            drafts = drafts.masked_fill_(past, 0)
        return Limits(drafts, most)

    def within_range(self, positions: Tensor) -> Tensor:
        """Positions that the drafter's tables hold; what lies past them is never accepted."""
        return positions if self._range is None else positions.clamp(max=self._range - 1)


def may_speculate(req: Req) -> bool:
    """Whether a request's drafts may be accepted at all.

    A custom logit processor may read the output so far and keep state, so it is called once per
    committed token, as without speculation. Images take positions and features that a drafter was
    not made for.
    """
    return req.custom_logit_processor is None and req.multimodal_inputs is None


def draft_range(draft_config: Any, target_config: ModelConfig) -> int | None:
    """Positions the drafter was made for; None when no request can get past them.

    Args:
        draft_config: the drafter's config.json.
        target_config: SGLang's view of the verifier.
    """
    positions: int | None = getattr(draft_config, "max_position_embeddings", None)
    # The last block of a request reaches past the context by its rejected drafts.
    reached = target_config.context_len + get_spec().speculative_num_draft_tokens
    return None if positions is None or positions >= reached else positions
