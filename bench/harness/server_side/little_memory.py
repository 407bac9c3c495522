"""A plugin for tests: rollback "auto" is left to the division of memory, which is little.

As on a GPU that cannot hold snapshots: the CPU platform would replay from the start.
"""

from __future__ import annotations

from typing import Any

# For the states of 32 running requests and their prefix cache, and not for their snapshots.
MEMORY_GB = 0.06


def register() -> None:
    """Entry point: the choice is made in the launcher, the division in the scheduler."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from dflash_sglang.preflight import rollback

    rollback._replays = lambda settings, device: False
    HookRegistry.register("dflash_sglang.hooks.apply", shrink_memory, HookType.BEFORE)


def shrink_memory(*args: Any, **kwargs: Any) -> None:
    """Divide little memory; our hook wraps what is put in place here."""
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

    division = KVCacheConfigurator._handle_max_mamba_cache

    def divide(configurator: Any, total_rest_memory: float) -> Any:
        return division(configurator, min(total_rest_memory, MEMORY_GB))

    KVCacheConfigurator._handle_max_mamba_cache = divide
