"""Accept sampled drafts as a block (Sun et al., arXiv 2403.10444)."""

from dflash_kernels.block_verify.reference import (
    Proposal,
    block_verify,
    bonus_weights,
    commit,
    draw,
    keep_probs,
    last_draft,
    proposed_probs,
    running_ratios,
)

__all__ = [
    "Proposal",
    "block_verify",
    "bonus_weights",
    "commit",
    "draw",
    "keep_probs",
    "last_draft",
    "proposed_probs",
    "running_ratios",
]
