"""How the recurrent layers of a hybrid verifier are rolled back: chosen at start.

SGLang has the flag, --enable-linear-replayssm-spec, and refuses it with DFLASH because its own
worker commits past it. Ours commits through it: the choice is made by the settings file and handed
to SGLang as that flag, and its refusal is lifted while it builds the pool.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dflash_sglang.config import Rollback, Settings, WorkerChoice, read_config, read_settings
from dflash_sglang.preflight.pair import ServedBy, check_pair

if TYPE_CHECKING:
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

LINEAR_STEP = "handle_linear_attn_backend"
REQUEST_POOL = (
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_hybrid_req_pool"
)
_REPLAY_FLAG = "--enable-linear-replayssm-spec"
# The commit multiplies matrices whose inner size is the ring's length; Triton's have 16 at least.
_SHORTEST_RING = 16


def rollback_problems(flags: Any, settings: Settings) -> list[str]:
    """What is wrong with the flags of the recurrent layers, a sentence each.

    Args:
        flags: a view with SGLang's flags as attributes.
        settings: the settings file.
    """
    problems = []
    replay = flags.enable_linear_replayssm_spec
    if replay and settings.rollback == Rollback.SNAPSHOT.value:
        problems.append(
            f"{_REPLAY_FLAG} and rollback 'snapshot' in the settings file are two answers to one "
            "question. Give one."
        )
    if (replay or settings.rollback == Rollback.REPLAY.value) and flags.enable_unified_memory:
        problems.append(
            f"--enable-unified-memory moves the states that {_REPLAY_FLAG} (or rollback 'replay') "
            "writes to. Use rollback 'snapshot', or leave it out."
        )
    return problems


def choose_rollback(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Resolution step: ask SGLang for its replay where the settings say so.

    Args:
        server_args: the `ServerArgs` in resolution.
        previous: the step this one wraps, which checks what the flag needs.
    """
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.arg_groups.overrides import declare_resolution

    flags = resolving_view(server_args)
    if (
        _ours(flags)
        and _replays(read_settings(flags.speculative_adaptive_config), flags.device)
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
    if _ours(flags) and flags.enable_linear_replayssm_spec and _has_delta_nets(server_args):
        length = record_length(flags.speculative_num_draft_tokens)
        declare_resolution(server_args, __name__, linear_replayssm_cache_len=length)


def record_length(block_size: int) -> int:
    """Tokens a request's record has room for: a power of two, which SGLang's ring asks for."""
    return max(_SHORTEST_RING, 1 << (block_size - 1).bit_length())


def admit_replay(
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


def _ours(flags: Any) -> bool:
    """Whether our worker will serve, as far as can be told before anything is fetched."""
    if (flags.speculative_algorithm or "").upper() != "DFLASH":
        return False
    if read_config(os.environ).worker is not WorkerChoice.DFLASH:
        return False
    pair = check_pair(
        flags.model_path,
        flags.speculative_draft_model_path,
        with_weights=False,
        revision=flags.revision,
        draft_revision=flags.speculative_draft_model_revision,
    )
    return pair.head_family is None or pair.head_family.served_by is ServedBy.OURS


def _replays(settings: Settings, device: str) -> bool:
    if settings.rollback == Rollback.AUTO.value:
        # On a GPU the replay's kernels have been run by nobody here: docs/recurrent-state.md.
        return device == "cpu"
    return settings.rollback == Rollback.REPLAY.value
