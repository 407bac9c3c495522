"""How many tokens of a drafted block are verified, decided before every step; plain Python.

`WidthPolicy` decides; `AcceptanceModel` knows how drafts have fared, `CostTable` what a step takes.
"""

from dflash_sglang.core.width.cost_model import CostTable, RunningMedian
from dflash_sglang.core.width.policy import ObservedStep, WidthPolicy
from dflash_sglang.core.width.settings import WidthSettings

__all__ = ["CostTable", "ObservedStep", "RunningMedian", "WidthPolicy", "WidthSettings"]
