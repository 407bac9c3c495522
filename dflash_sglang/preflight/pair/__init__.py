"""The pair check: whether a draft head fits a verifier, and which family it belongs to."""

from dflash_sglang.preflight.pair.check import check_pair
from dflash_sglang.preflight.pair.layout import Layout, Server, draft_layout
from dflash_sglang.preflight.pair.locate import Located, Where, locate
from dflash_sglang.preflight.pair.report import Finding, PairReport, Severity, numbered

__all__ = [
    "Finding",
    "Layout",
    "Located",
    "PairReport",
    "Server",
    "Severity",
    "Where",
    "check_pair",
    "draft_layout",
    "locate",
    "numbered",
]
