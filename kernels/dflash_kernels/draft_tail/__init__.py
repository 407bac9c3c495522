"""The drafter's most likely tokens and how sure it is of them, in one pass over its logits."""

import torch
from torch import Tensor

from dflash_kernels.dispatch import runs_triton
from dflash_kernels.draft_tail import reference
from dflash_kernels.types import Tail

__all__ = ["draft_tail"]

MAX_TOP = 32


def draft_tail(logits: Tensor, *, num_ids: int, top: int = 1, normaliser: bool = True) -> Tail:
    r"""The `top` largest logits of every row, and the row's log normaliser.

        ids = the first `top` of argsort(-x, stable),   lse = log sum_{v < num_ids} exp(x_v)

    so that ``exp(values - lse)`` (`Tail.probs`) is each id's probability. Everything is computed in
    float32 from the logits as they are; no float32 copy is made. Ties go to the smallest id.

    Under tensor parallelism each rank calls it on its part of the vocabulary; after gathering,
    the largest value wins, the lowest rank among equals, and lse = logsumexp over the ranks.

    Args:
        logits: [rows, V] bfloat16, float16 or float32, adjacent columns. NaN counts as -inf.
        num_ids: valid columns; those from `num_ids` on are padding and never chosen.
        top: K, 1 .. 32.
        normaliser: whether lse is wanted. The kernel has it for nothing, torch takes three more
            passes.

    Returns:
        The tail. A row without a finite logit gives the ids 0 .. K-1 and an lse of -inf.

    Raises:
        ValueError: `top` or `num_ids` is out of range.
    """
    if not 1 <= top <= min(MAX_TOP, num_ids):
        raise ValueError(f"expected 1 <= top <= min({MAX_TOP}, num_ids={num_ids}), got {top}")
    if num_ids > logits.shape[1]:
        raise ValueError(f"expected num_ids <= {logits.shape[1]}, the columns; got {num_ids}")
    if runs_triton(logits):
        ids, values, lse = _draft_tail(logits, num_ids, top)
        return Tail(ids, values, lse if normaliser else None)
    return reference.draft_tail(logits, num_ids=num_ids, top=top, normaliser=normaliser)


@torch.library.custom_op("dflash::draft_tail", mutates_args=())
def _draft_tail(logits: Tensor, num_ids: int, top: int) -> tuple[Tensor, Tensor, Tensor]:
    from dflash_kernels.draft_tail import kernel

    return kernel.draft_tail(logits, num_ids=num_ids, top=top)


@_draft_tail.register_fake
def _(logits: Tensor, num_ids: int, top: int) -> tuple[Tensor, Tensor, Tensor]:
    ids = logits.new_empty((logits.shape[0], top), dtype=torch.int64)
    return (
        ids,
        torch.empty_like(ids, dtype=torch.float32),
        ids.new_empty(logits.shape[0], dtype=torch.float32),
    )
