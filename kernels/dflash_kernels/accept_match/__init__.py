"""Accept the longest prefix of the draft that the verifier would have produced itself."""

import torch
from torch import Tensor

from dflash_kernels.accept_match import reference
from dflash_kernels.dispatch import runs_triton
from dflash_kernels.types import Acceptance

__all__ = ["accept_match"]


def accept_match(
    draft_ids: Tensor,
    verifier_ids: Tensor,
    prefix_lens: Tensor,
    *,
    limit: Tensor | None = None,
    extra_accept: Tensor | None = None,
) -> Acceptance:
    r"""Compare a drafted block with the verifier's tokens and commit the matching prefix plus one.

    With d the block (d_0 the anchor) and y_i the verifier's token after d_0 .. d_i:

        accept_len = max { n <= limit : y_{i-1} = d_i or extra_accept_{i-1}, for all 1 <= i <= n }

    and the committed tokens are d_1 .. d_{accept_len} and the bonus y_{accept_len}, the verifier's
    token at the first mismatch. Without `extra_accept`, accepted drafts are y itself, so
    what is committed is y_0 .. y_{accept_len}. The rule is then the same for greedy tokens and for
    tokens sampled from the verifier, whose distribution it keeps: a draft is a point mass, and
    whether it matches only decides how much of y is used, never what y is.

    One launch. A row of any width up to a few hundred is one program.

    Args:
        draft_ids: [bs, width] int64, column 0 the anchor.
        verifier_ids: [bs, width] int64, y.
        prefix_lens: [bs] int64, tokens in the KV cache before the verify.
        limit: [bs] int32, the most drafts a row may accept; None: all.
        extra_accept: [bs, width - 1] bool, drafts accepted although they differ from y; None: none.

    Returns:
        The acceptance. Without `extra_accept`, `output_ids` is `verifier_ids` itself.
    """
    if not runs_triton(draft_ids):
        return reference.accept_match(
            draft_ids, verifier_ids, prefix_lens, limit=limit, extra_accept=extra_accept
        )
    accept_len, commit_len, bonus_ids, new_seq_lens, output_ids = _accept_match(
        draft_ids, verifier_ids, prefix_lens, limit, extra_accept
    )
    return Acceptance(
        accept_len=accept_len,
        commit_len=commit_len,
        bonus_ids=bonus_ids,
        # An op's output may not be its input: it returns an empty tensor in this place.
        output_ids=verifier_ids if extra_accept is None else output_ids,
        new_seq_lens=new_seq_lens,
    )


@torch.library.custom_op("dflash::accept_match", mutates_args=())
def _accept_match(
    draft_ids: Tensor,
    verifier_ids: Tensor,
    prefix_lens: Tensor,
    limit: Tensor | None,
    extra_accept: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from dflash_kernels.accept_match import kernel

    got = kernel.accept_match(
        draft_ids, verifier_ids, prefix_lens, limit=limit, extra_accept=extra_accept
    )
    output_ids = verifier_ids.new_empty(0) if extra_accept is None else got.output_ids
    return got.accept_len, got.commit_len, got.bonus_ids, got.new_seq_lens, output_ids


@_accept_match.register_fake
def _(
    draft_ids: Tensor,
    verifier_ids: Tensor,
    prefix_lens: Tensor,
    limit: Tensor | None,
    extra_accept: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    accept_len = draft_ids.new_empty(draft_ids.shape[0], dtype=torch.int32)
    return (
        accept_len,
        torch.empty_like(accept_len),
        torch.empty_like(accept_len, dtype=torch.int64),
        torch.empty_like(prefix_lens),
        verifier_ids.new_empty(0 if extra_accept is None else verifier_ids.shape),
    )
