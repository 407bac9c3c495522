"""The drafter's most likely tokens and their probabilities, in one pass over its logits."""

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
        normaliser: whether to compute lse. It costs the kernel nothing; torch reads the logits
            three times more for it.

    Returns:
        The tail. A row without a finite logit gives the ids 0 .. K-1 and an lse of -inf.

    Raises:
        ValueError: `top` or `num_ids` is out of range.

    Example:
        >>> tail = draft_tail(torch.tensor([[0.0, 3.0, 1.0, 9.0]]), num_ids=3, top=2)
        >>> tail.ids.tolist(), tail.values.tolist()  # column 3 is padding
        ([[1, 2]], [[3.0, 1.0]])
    """
    if not 1 <= top <= min(MAX_TOP, num_ids):
        raise ValueError(f"expected 1 <= top <= min({MAX_TOP}, num_ids={num_ids}), got {top}")
    if num_ids > logits.shape[1]:
        raise ValueError(f"expected num_ids <= {logits.shape[1]}, the columns; got {num_ids}")
    if not runs_triton(logits):
        return reference.draft_tail(logits, num_ids=num_ids, top=top, normaliser=normaliser)
    from dflash_kernels.draft_tail import kernel

    ids, values, lse = kernel.draft_tail_op(logits, num_ids, top)
    return Tail(ids, values, lse if normaliser else None)
