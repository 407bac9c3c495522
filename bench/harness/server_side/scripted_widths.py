"""A plugin for tests: steps whose width a request's id names, or that have a random one.

    <id>~width      another width each step
    <id>~width-<w>  steps of this width
    <id>~bound      whole blocks, of which another number of tokens is verified each step
    <id>~bound-<n>  whole blocks, of which n tokens are verified

Other requests' widths and bounds are the policy's. A bound is scripted by the tables that the
device decides by: only one number of tokens has a price that is not infinite.
"""

from __future__ import annotations

import random
import re
from collections.abc import Hashable, Sequence
from math import inf

SCRIPT = re.compile(r"~width(?:-(\d+))?$")
BOUND = re.compile(r"~bound(?:-(\d+))?$")


def register() -> None:
    """Entry point: replaces the choice in whatever process makes one."""
    from dflash_sglang.core.width import BoundTables, WidthPolicy

    generator = random.Random(0)
    policys_choose, policys_tables = WidthPolicy.choose, WidthPolicy.bound_tables

    def bound_tables(policy: WidthPolicy, key: Hashable, width: int) -> BoundTables | None:
        tables, script = policys_tables(policy, key, width), BOUND.search(str(key))
        if tables is None or script is None:
            return tables
        drafts = min(int(script[1] or generator.randint(1, width)), width) - 1
        return tables._replace(prices=[0.0 if n == drafts else inf for n in range(width)])

    def choose(policy: WidthPolicy, keys: Sequence[Hashable]) -> int:
        width = policys_choose(policy, keys)
        if any(BOUND.search(str(key)) for key in keys):
            return policy.widths[-1]
        scripted = scripted_widths(keys)
        if scripted is None:
            return width
        return generator.choice(scripted or policy.widths)

    WidthPolicy.choose = choose  # type: ignore[assignment, method-assign]
    WidthPolicy.bound_tables = bound_tables  # type: ignore[assignment, method-assign]


def scripted_widths(keys: Sequence[Hashable]) -> list[int] | None:
    """Widths to choose from: none to choose from all, None to leave the choice to the policy."""
    found = [match for match in (SCRIPT.search(str(key)) for key in keys) if match]
    return [int(match[1]) for match in found if match[1]] if found else None
