"""The accept rules, and how they share a batch.

To match (`dflash_kernels.accept_match`) is the rule of this package: exact for every request,
greedy or sampled. The two rules for sampled drafts are exact as well, but their text depends on the
draft; the relaxed rule is not exact and served only on request.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch
from dflash_kernels.block_verify import block_verify, token_wise
from dflash_kernels.types import Acceptance
from torch import Tensor


class Rule(Enum):
    """How drafts of sampled requests are accepted; greedy requests always match."""

    MATCH = "sample and match"
    TOKEN_WISE = "token-wise rejection sampling"
    BLOCK = "block verification"


class Thresholds(NamedTuple):
    """SGLang's --speculative-accept-threshold-{single,acc}; 1 and 1 are exact."""

    single: float
    acc: float

    @property
    def exact(self) -> bool:
        """Whether the relaxed rule is the exact one."""
        return self.single >= 1 and self.acc >= 1


# The rules for sampled drafts; arguments and result of each are those of `block_verify`.
REJECTIONS = {Rule.TOKEN_WISE: token_wise, Rule.BLOCK: block_verify}


def relaxed(
    draft_ids: Tensor,
    verifier_ids: Tensor,
    verifier_probs: Tensor,
    uniforms: Tensor,
    thresholds: Thresholds,
) -> Tensor:
    """Drafts that the relaxed rule accepts besides those that match.

    A draft d of probability p = p(d) is accepted if p is at least `single`, or with probability
    min(1, p / acc). It matches the verifier's draw with probability p already, so a mismatch is
    accepted with probability (min(1, p / acc) - p) / (1 - p). A rejected position still commits the
    verifier's draw, which is then distributed as p without d. With acc = 1 and single = 1 nothing
    is added.

    Args:
        draft_ids: [bs, width] int64.
        verifier_ids: [bs, width] int64, drawn from `verifier_probs`.
        verifier_probs: [bs, width, vocab] float32.
        uniforms: [bs, width - 1] float32 in [0, 1).
        thresholds: both in (0, 1].

    Returns:
        [bs, width - 1] bool.

    Source: the help texts of the two flags in sglang/srt/arg_groups/fields/spec.py.
    """
    p = verifier_probs[:, :-1].gather(2, draft_ids[:, 1:, None]).squeeze(2)
    wanted = (p / thresholds.acc).clamp(max=1)
    # uniforms < (wanted - p) / (1 - p), without the division.
    by_chance = uniforms * (1 - p) < wanted - p
    mismatch = draft_ids[:, 1:] != verifier_ids[:, :-1]
    return mismatch & (by_chance | ((p >= thresholds.single) & (thresholds.single < 1)))


def by_row(chosen: Tensor, first: Acceptance, second: Acceptance) -> Acceptance:
    """Rows of `first` where `chosen` ([bs] bool), of `second` elsewhere."""

    def pick(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(chosen.view(-1, *(1,) * (a.dim() - 1)), a, b)

    return Acceptance(*map(pick, first, second))
