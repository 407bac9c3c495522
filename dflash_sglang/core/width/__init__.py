"""The width of each step: how many tokens of a block are drafted and verified; plain Python.

`WidthPolicy` chooses it. `AcceptanceModel` predicts how many tokens a width commits, `CostTable`
how long it takes; `Narrowing` ends a single request's verify early.
"""

from dflash_sglang.core.width.cost_model import CostTable, RunningMedian
from dflash_sglang.core.width.narrowing import Bound, BoundTables
from dflash_sglang.core.width.policy import ObservedStep, WidthPolicy
from dflash_sglang.core.width.settings import WidthSettings

__all__ = [
    "Bound",
    "BoundTables",
    "CostTable",
    "ObservedStep",
    "RunningMedian",
    "WidthPolicy",
    "WidthSettings",
]
