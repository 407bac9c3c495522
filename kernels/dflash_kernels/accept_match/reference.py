"""Torch form of `accept_match`; runs on every device."""

from typing import NamedTuple

import torch
from torch import Tensor


class Acceptance(NamedTuple):
    """What one verify commits. `commit_len` counts the bonus token: commit_len = accept_len + 1."""

    accept_len: Tensor  # [bs] int32, drafts accepted, 0 .. width-1
    commit_len: Tensor  # [bs] int32, tokens committed, 1 .. width
    bonus_ids: Tensor  # [bs] int64, the token after the accepted drafts
    output_ids: Tensor  # [bs, width] int64, row i is committed up to commit_len[i]
    new_seq_lens: Tensor  # [bs] int64, tokens in the KV cache after the commit


def accept_match(
    draft_ids: Tensor,
    target_ids: Tensor,
    prefix_lens: Tensor,
    *,
    limit: Tensor | None = None,
    also: Tensor | None = None,
) -> Acceptance:
    r"""Compare a drafted block with the verifier's tokens and commit the matching prefix plus one.

    With d the block (d_0 the anchor) and y_i the verifier's token after d_0 .. d_i:

        accept_len = max { n <= limit : y_{i-1} = d_i or also_i, for all 1 <= i <= n }

    and the committed tokens are d_1 .. d_{accept_len}, y_{accept_len}. Without `also`, accepted
    drafts equal the verifier's tokens and the bonus is its token at the first mismatch. That rule
    is the same for greedy tokens and for tokens sampled from the verifier, whose distribution it
    keeps: a draft is a point mass, and whether it matches only decides how much of y is used, never
    what y is.

    Args:
        draft_ids: [bs, width] int64, column 0 the anchor.
        target_ids: [bs, width] int64, y.
        prefix_lens: [bs] int64, tokens in the KV cache before the verify.
        limit: [bs] int32, most drafts a request may accept; None for no limit.
        also: [bs, width - 1] bool, drafts to accept although they differ from the verifier's token;
            not exact. None for none.

    Returns:
        The acceptance. Columns of `output_ids` past `commit_len` are the verifier's tokens.
    """
    drafted = draft_ids[:, 1:]
    accepted = drafted == target_ids[:, :-1]
    if also is not None:
        accepted = accepted | also
    if limit is not None:
        accepted = accepted & (torch.arange(drafted.shape[1], device=limit.device) < limit[:, None])
    prefix = accepted.to(torch.int32).cumprod(dim=1)
    accept_len = prefix.sum(dim=1, dtype=torch.int32)
    output_ids = target_ids
    if also is not None:
        output_ids = target_ids.clone()
        output_ids[:, :-1] = torch.where(prefix.bool(), drafted, target_ids[:, :-1])
    commit_len = accept_len + 1
    return Acceptance(
        accept_len=accept_len,
        commit_len=commit_len,
        bonus_ids=target_ids.gather(1, accept_len[:, None].to(torch.int64)).squeeze(1),
        output_ids=output_ids,
        new_seq_lens=prefix_lens + commit_len,
    )
