"""A single request's verify ends where its drafts are not worth it; the device decides, alone.

The draft graph writes the bound into a buffer (`dflash_kernels.verify_bound`). From there it is
read by the verifier's router, which sends the rows behind it to no expert, and by the accept rule,
which accepts none of them. Those rows hold nothing of use: their keys and values are overwritten
by the next block, as those of every rejected draft are. The host reads the bound a step later, with
the outcome, so it never waits.

Why one request only: the rows of a batch's first block are a prefix of the batch, those of a second
one are not, and SGLang's router takes a bound, not a mask.

Source: `resolve_routing_inputs` in sglang/srt/layers/moe/topk.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from dflash_kernels.verify_bound import CLASSES, verify_bound
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.utils.common import async_h2d
from torch import Tensor

from dflash_sglang.core.width import Bound

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

# Of a table's entries, in tokens and in probability: smaller changes are not worth a copy.
NOTICEABLE = 0.01


class VerifyBound:
    """The buffers of the bound, of a server's widths."""

    def __init__(self, widths: Collection[int], device: torch.device | str) -> None:
        """Everything is verified until tables say otherwise.

        Args:
            widths: of drafted blocks.
            device: of the verifier.
        """
        self._tables = {width: _tables(width, device) for width in widths}
        self._known: dict[int, Sequence[float]] = {}  # what the tables hold, by width
        # As `verify_bound` returns it; captured graphs read and write it in place.
        self._result = torch.zeros(1 + max(widths), dtype=torch.int32, device=device)
        self.hold(max(widths))

    @property
    def tokens(self) -> Tensor:
        """Tokens to verify, a scalar of int32 on the device."""
        return self._result[0]

    @property
    def limit(self) -> Tensor:
        """Drafts that are verified, and so may be accepted, [1] int32 on the device."""
        return self._result[1:2]

    def decide(self, values: Tensor, lse: Tensor) -> None:
        """Set the bound by what was drafted.

        Args:
            values: [width - 1] float32, the largest logit of every drafted position.
            lse: [width - 1] float32, its log normaliser.
        """
        width = len(values) + 1
        tables = self._tables[width]
        result = verify_bound(values, lse, tables[:CLASSES], tables[CLASSES:])
        self._result[: width + 1].copy_(result)

    def hold(self, tokens: int) -> None:
        """Set the bound to a number of tokens, until a draft decides."""
        self._result[:2].copy_(torch.tensor([tokens, tokens - 1], dtype=torch.int32))

    def set_tables(self, width: int, values: Sequence[float]) -> None:
        """Judge the next drafts of this width by other tables, if they differ noticeably.

        Args:
            width: of the draft.
            values: acceptance by class, then the price of 0 .. width - 1 drafts (`BoundTables`).
        """
        known = self._known.get(width)
        if known is None or any(
            # Equal infinities are not apart.
            one != other and not abs(one - other) < NOTICEABLE
            for one, other in zip(values, known, strict=True)
        ):
            self._known[width] = values
            buffer = self._tables[width]
            buffer.copy_(async_h2d(list(values), dtype=torch.float32, device=buffer.device))

    def copy_to_host(self, width: int) -> Tensor:
        """Start to copy the last decision.

        Returns:
            [width + 1] int32 on the host, complete as soon as the stream has got here.
        """
        result = self._result[: width + 1]
        on_host = torch.empty(result.shape, dtype=result.dtype, pin_memory=result.is_cuda)
        return on_host.copy_(result, non_blocking=True)


def _tables(width: int, device: torch.device | str) -> Tensor:
    """Acceptance by class, then the price of each number of drafts; all are verified."""
    return torch.cat([torch.ones(CLASSES), torch.zeros(width)]).to(device)


def read_bound(on_host: Tensor) -> Bound:
    """A decision that has arrived.

    Args:
        on_host: of `VerifyBound.copy_to_host`.
    """
    verified, _, *classes = on_host.tolist()
    return Bound(verified, classes)


_bound: VerifyBound | None = None  # of the worker of this process


def bound_experts(bound: VerifyBound) -> None:
    """From now on verifies of one request send only the tokens of this bound to experts."""
    global _bound
    _bound = bound


def routed_tokens(batch: ForwardBatch) -> Tensor | None:
    """Tokens that go to experts, a scalar of int32 on the device; None for all of a forward's.

    Called while a forward runs, or is captured: a graph keeps the buffer, whose value changes.

    Args:
        batch: of any forward in this process, the drafter's included.
    """
    if (
        _bound is None
        or batch.batch_size != 1
        or not batch.forward_mode.is_target_verify()
        # The drafter's forwards are in the same mode, and capture nothing.
        or batch.capture_hidden_mode != CaptureHiddenMode.FULL
        or len(batch.input_ids) == 1
    ):
        return None
    return _bound.tokens
