"""A plugin for tests: a width policy that picks at random."""

from __future__ import annotations

import random
from typing import Any


def register() -> None:
    """Entry point: replaces the choice in whatever process makes one."""
    from dflash_sglang.core.width import WidthPolicy

    generator = random.Random(0)

    def choose(policy: WidthPolicy, keys: Any) -> int:
        width: int = generator.choice(policy.widths)
        return width

    WidthPolicy.choose = choose  # type: ignore[method-assign, assignment]
