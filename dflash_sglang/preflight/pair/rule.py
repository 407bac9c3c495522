"""What a rule is: one question about a pair, answered with findings.

Rules read the raw configuration, not a parsed one, so that a pair with three faults gets all
three findings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dflash_sglang.json_values import as_int
from dflash_sglang.preflight.pair.head_family import HeadFamily, setting
from dflash_sglang.preflight.pair.report import Finding
from dflash_sglang.preflight.pair.verifier import VerifierFacts


@dataclass(frozen=True)
class Pair:
    """What the rules look at."""

    draft: Mapping[str, Any]  # config.json of the drafter
    family: HeadFamily
    verifier: VerifierFacts
    block_size: int | None  # given on the command line; None: the trained one
    tp_size: int

    def draft_int(self, key: str) -> int | None:
        """An integer setting of the drafter, None where it is missing or something else."""
        return as_int(setting(self.draft, key))


Rule = Callable[[Pair], Iterator[Finding]]
