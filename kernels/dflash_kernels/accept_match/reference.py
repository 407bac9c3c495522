"""Torch form of `accept_match`; runs on every device."""

import torch
from torch import Tensor

from dflash_kernels.types import Acceptance


def accept_match(
    draft_ids: Tensor,
    verifier_ids: Tensor,
    prefix_lens: Tensor,
    *,
    limit: Tensor | None = None,
    extra_accept: Tensor | None = None,
) -> Acceptance:
    """Reference of `dflash_kernels.accept_match.accept_match`."""
    if draft_ids.shape[1] == 1:
        return _no_drafts(verifier_ids, prefix_lens)
    drafts = draft_ids[:, 1:]  # [bs, width - 1], drafts[:, i] is compared with verifier_ids[:, i]
    accepted = drafts == verifier_ids[:, :-1]
    if extra_accept is not None:
        accepted = accepted | extra_accept
    columns = torch.arange(drafts.shape[1], device=draft_ids.device)
    if limit is not None:
        accepted = accepted & (columns < limit[:, None])
    accept_len = accepted.to(torch.int32).cumprod(dim=1).sum(dim=1, dtype=torch.int32)
    commit_len = accept_len + 1
    output_ids = verifier_ids
    if extra_accept is not None:
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
