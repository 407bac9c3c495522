"""A plugin for tests: steps whose width a request's id names, or that have a random one.

    <id>~width      another width each step
    <id>~width-<w>  steps of this width

Other requests' widths are the policy's.
"""

from __future__ import annotations

import random
import re
from collections.abc import Hashable, Sequence

SCRIPT = re.compile(r"~width(?:-(\d+))?$")


def register() -> None:
    """Entry point: replaces the choice in whatever process makes one."""
    from dflash_sglang.core.width import WidthPolicy

    generator = random.Random(0)
    policys_choose = WidthPolicy.choose

    def choose(policy: WidthPolicy, keys: Sequence[Hashable]) -> int:
        width = policys_choose(policy, keys)
        scripted = scripted_widths(keys)
        if scripted is None:
            return width
        return generator.choice(scripted or policy.widths)

    WidthPolicy.choose = choose  # type: ignore[assignment, method-assign]


def scripted_widths(keys: Sequence[Hashable]) -> list[int] | None:
    """Widths to choose from: none to choose from all, None to leave the choice to the policy."""
    found = [match for match in (SCRIPT.search(str(key)) for key in keys) if match]
    return [int(match[1]) for match in found if match[1]] if found else None
