"""Accept the longest prefix of the draft that the verifier would have produced itself."""

import torch
from torch import Tensor

from dflash_kernels.accept_match import reference
from dflash_kernels.accept_match.reference import Acceptance
from dflash_kernels.dispatch import runs_triton

__all__ = ["Acceptance", "accept_match"]


def accept_match(
    draft_ids: Tensor,
    verifier_ids: Tensor,
    prefix_lens: Tensor,
    *,
    limit: Tensor | None = None,
    also: Tensor | None = None,
) -> Acceptance:
    r"""Compare a drafted block with the verifier's tokens and commit the matching prefix plus one.

    With d the block (d_0 the anchor) and y_i the verifier's token after d_0 .. d_i:

        accept_len = max { n <= limit : y_{i-1} = d_i or also_{i-1}, for all 1 <= i <= n }

    and the committed tokens are d_1 .. d_{accept_len} and the bonus y_{accept_len}, the verifier's
    token at the first mismatch. Without `also`, accepted drafts equal the verifier's tokens, so
    what is committed is y_0 .. y_{accept_len}. The rule is then the same for greedy tokens and for
    tokens sampled from the verifier, whose distribution it keeps: a draft is a point mass, and
    whether it matches only decides how much of y is used, never what y is.

    One launch. A row of any width up to a few hundred is one program.

    Args:
        draft_ids: [bs, width] int64, column 0 the anchor.
        verifier_ids: [bs, width] int64, y.
        prefix_lens: [bs] int64, tokens in the KV cache before the verify.
        limit: [bs] int32, the most drafts a row may accept; None: all.
        also: [bs, width - 1] bool, drafts accepted although they differ from y; None: none.

    Returns:
        The acceptance. Without `also`, `output_ids` is `verifier_ids` itself.
    """
    if not runs_triton(draft_ids):
        return reference.accept_match(draft_ids, verifier_ids, prefix_lens, limit=limit, also=also)
    accept_len, commit_len, bonus_ids, new_seq_lens, output_ids = _accept_match(
        draft_ids, verifier_ids, prefix_lens, limit, also
    )
    return Acceptance(
        accept_len=accept_len,
        commit_len=commit_len,
        bonus_ids=bonus_ids,
        # An op's output may not be its input: it returns an empty tensor in this place.
        output_ids=verifier_ids if also is None else output_ids,
        new_seq_lens=new_seq_lens,
    )


@torch.library.custom_op("dflash::accept_match", mutates_args=())
def _accept_match(
    draft_ids: Tensor,
    verifier_ids: Tensor,
    prefix_lens: Tensor,
    limit: Tensor | None,
    also: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from dflash_kernels.accept_match import kernel

    got = kernel.accept_match(draft_ids, verifier_ids, prefix_lens, limit=limit, also=also)
    output_ids = verifier_ids.new_empty(0) if also is None else got.output_ids
    return got.accept_len, got.commit_len, got.bonus_ids, got.new_seq_lens, output_ids


@_accept_match.register_fake
def _(
    draft_ids: Tensor,
    verifier_ids: Tensor,
    prefix_lens: Tensor,
    limit: Tensor | None,
    also: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    accept_len = draft_ids.new_empty(draft_ids.shape[0], dtype=torch.int32)
    return (
        accept_len,
        torch.empty_like(accept_len),
        torch.empty_like(accept_len, dtype=torch.int64),
        torch.empty_like(prefix_lens),
        verifier_ids.new_empty(0 if also is None else verifier_ids.shape),
    )
