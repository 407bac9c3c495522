"""How the recurrent layers of a hybrid verifier are rolled back: chosen at start.

SGLang has the flag, --enable-linear-replayssm-spec, and refuses it with DFLASH because its own
worker does not commit the record that it keeps. Ours does: the settings file makes the choice, it
is handed to SGLang as that flag, and its refusal is lifted while it builds the pool.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dflash_sglang.config import Rollback, Settings
from dflash_sglang.preflight.refused_flags import read_settings_of
from dflash_sglang.preflight.serving import serving_with

if TYPE_CHECKING:
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

# The commit multiplies matrices whose inner size is the ring's length; Triton's have 16 at least.
_SHORTEST_RING = 16


def choose_rollback(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Resolution step: select SGLang's replay where our worker serves and the settings say so.

    Args:
        server_args: the `ServerArgs` in resolution.
        previous: the step this one wraps, which checks what the flag needs.
    """
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.arg_groups.overrides import declare_resolution

    flags = resolving_view(server_args)
    if (
        serving_with(flags, os.environ).ours
        and _replays(read_settings_of(flags), flags.device)
        and _has_delta_nets(server_args)
    ):
        declare_resolution(server_args, __name__, enable_linear_replayssm_spec=True)
    previous(server_args)


def size_record(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Resolution step: make room for the record of one block, once its size is known.

    Args:
        server_args: the `ServerArgs` in resolution.
        previous: the step this one wraps, which settles the block size.
    """
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.arg_groups.overrides import declare_resolution

    previous(server_args)
    flags = resolving_view(server_args)
    # SGLang sizes the records of other recurrent layers itself.
    if (
        flags.enable_linear_replayssm_spec
        and serving_with(flags, os.environ).ours
        and _has_delta_nets(server_args)
    ):
        length = record_length(flags.speculative_num_draft_tokens)
        declare_resolution(server_args, __name__, linear_replayssm_cache_len=length)


def record_length(block_size: int) -> int:
    """Tokens that a request's record has room for: a power of two, as SGLang's ring requires."""
    return max(_SHORTEST_RING, 1 << (block_size - 1).bit_length())


def allow_replay(
    original: Callable[..., Any], configurator: KVCacheConfigurator, **sizes: Any
) -> Any:
    """AROUND hook on `KVCacheConfigurator._build_hybrid_req_pool`.

    It refuses the flag for DFLASH and reads the algorithm for nothing else.
    """
    from sglang.srt.runtime_context import get_spec

    with get_spec().override(speculative_algorithm=None):
        return original(configurator, **sizes)


def _has_delta_nets(server_args: Any) -> bool:
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.configs.hybrid_arch import hybrid_gdn_config

    return hybrid_gdn_config(model_config_of(server_args)) is not None


def _replays(settings: Settings, device: str) -> bool:
    if settings.rollback == Rollback.AUTO:
        # Elsewhere memory decides, when the pools are sized: rollback_by_memory.py.
        return device == "cpu"
    return settings.rollback == Rollback.REPLAY
