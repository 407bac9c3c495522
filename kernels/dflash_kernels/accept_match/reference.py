"""Torch form of `accept_match`; runs on every device."""

from typing import NamedTuple

import torch
from torch import Tensor


class Acceptance(NamedTuple):
    """What one verify commits. `commit_len` counts the bonus token: commit_len = accept_len + 1."""

    accept_len: Tensor  # [bs] int32, drafts accepted, 0 .. width-1
    commit_len: Tensor  # [bs] int32, tokens committed, 1 .. width
    bonus_ids: Tensor  # [bs] int64, the verifier's own token after the accepted drafts
    output_ids: Tensor  # [bs, width] int64, row i is committed up to commit_len[i]
    new_seq_lens: Tensor  # [bs] int64, tokens in the KV cache after the commit


def new_acceptance(verifier_ids: Tensor, prefix_lens: Tensor, *, output: bool) -> Acceptance:
    """An acceptance to be filled; `output_ids` is a new tensor or `verifier_ids`.

    Args:
        verifier_ids: [bs, width] int64.
        prefix_lens: [bs] integers.
        output: the kernel writes `output_ids`.
    """
    bs, device = verifier_ids.shape[0], verifier_ids.device
    return Acceptance(
        accept_len=torch.empty(bs, dtype=torch.int32, device=device),
        commit_len=torch.empty(bs, dtype=torch.int32, device=device),
        bonus_ids=torch.empty(bs, dtype=torch.int64, device=device),
        output_ids=torch.empty(verifier_ids.shape, dtype=torch.int64, device=device)
        if output
        else verifier_ids,
        new_seq_lens=torch.empty(bs, dtype=prefix_lens.dtype, device=device),
    )


def accept_match(
    draft_ids: Tensor,
    verifier_ids: Tensor,
    prefix_lens: Tensor,
    *,
    limit: Tensor | None = None,
    also: Tensor | None = None,
) -> Acceptance:
    """Reference of `dflash_kernels.accept_match.accept_match`."""
    if draft_ids.shape[1] == 1:
        return _no_drafts(verifier_ids, prefix_lens)
    drafts = draft_ids[:, 1:]  # [bs, width - 1], drafts[:, i] is compared with verifier_ids[:, i]
    accepted = drafts == verifier_ids[:, :-1]
    if also is not None:
        accepted = accepted | also
    columns = torch.arange(drafts.shape[1], device=draft_ids.device)
    if limit is not None:
        accepted = accepted & (columns < limit[:, None])
    accept_len = accepted.to(torch.int32).cumprod(dim=1).sum(dim=1, dtype=torch.int32)
    commit_len = accept_len + 1
    output_ids = verifier_ids
    if also is not None:
        output_ids = verifier_ids.clone()
        output_ids[:, :-1] = torch.where(
            columns < accept_len[:, None], drafts, verifier_ids[:, :-1]
        )
    return Acceptance(
        accept_len=accept_len,
        commit_len=commit_len,
        bonus_ids=verifier_ids.gather(1, accept_len[:, None].to(torch.int64)).squeeze(1),
        output_ids=output_ids,
        new_seq_lens=prefix_lens + commit_len,
    )


def _no_drafts(verifier_ids: Tensor, prefix_lens: Tensor) -> Acceptance:
    """Plain decoding: fewer ops, since nothing hides their cost there."""
    accept_len = torch.zeros_like(prefix_lens, dtype=torch.int32)
    return Acceptance(
        accept_len=accept_len,
        commit_len=torch.ones_like(accept_len),
        bonus_ids=verifier_ids[:, 0],
        output_ids=verifier_ids,
        new_seq_lens=prefix_lens + 1,
    )
