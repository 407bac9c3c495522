"""A plugin for benchmarks: the replay of recurrent layers multiplies as on an NVIDIA GPU.

DFLASH_TF32 names how the operands become TF32, a value of `bench.rollback.tf32.Products`.
"""

from __future__ import annotations

import functools
import os
from typing import Any

TF32 = "DFLASH_TF32"


def register() -> None:
    """Entry point: waits for our worker to be chosen, which happens in the scheduler only."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("dflash_sglang.hooks.apply", round_products, HookType.BEFORE)


def round_products(*args: Any, **kwargs: Any) -> None:
    """Put the emulation in the place of the verify's recurrence."""
    from bench.rollback.tf32 import Products, verify
    from dflash_sglang.cpu.gated_delta import replay

    products = Products(os.environ[TF32])
    replay.run_block = functools.partial(verify, products=products)  # type: ignore[attr-defined]
