"""The pair check: whether a draft head fits a verifier, and which family it belongs to."""

from dflash_sglang.preflight.pair.check import check_pair, draft_head_family
from dflash_sglang.preflight.pair.head_family import HeadFamily, ServedBy, head_family
from dflash_sglang.preflight.pair.locate import Located, Where, locate
from dflash_sglang.preflight.pair.report import Finding, PairReport, Severity, numbered

__all__ = [
    "Finding",
    "HeadFamily",
    "Located",
    "PairReport",
    "ServedBy",
    "Severity",
    "Where",
    "check_pair",
    "draft_head_family",
    "head_family",
    "locate",
    "numbered",
]
