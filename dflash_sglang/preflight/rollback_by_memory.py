"""Rollback "auto" on a GPU: replay where snapshots would hold the running requests down.

How many requests have recurrent states is known only in the scheduler, when SGLang divides what the
weights have left. The choice is made there, from SGLang's own division with either way, before any
pool is built: docs/method/recurrent-state.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from dflash_sglang.config import Rollback, read_settings
from dflash_sglang.preflight.rollback import record_length

if TYPE_CHECKING:
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

logger = logging.getLogger(__name__)

_REPLAYING_BACKENDS = ("triton", "flashinfer")  # of plain decoding, as SGLang requires

# SGLang's division: from the GB that are left to the GB without states. It sets the number of
# states, max_mamba_cache_size.
Division = Callable[["KVCacheConfigurator", float], float]


def divide_memory(original: Division, configurator: KVCacheConfigurator, memory: float) -> float:
    """AROUND hook on `KVCacheConfigurator._handle_max_mamba_cache`: choose, then divide.

    Memory is the least of all ranks, so all choose alike.

    Args:
        original: SGLang's division.
        configurator: its owner.
        memory: GB left beside the weights.

    Returns:
        GB left for keys and values.
    """
    from sglang.srt.runtime_context import get_context, get_schedule, get_spec

    if _is_open(configurator):
        why_not = _obstacle(configurator)
        asked = max(1, get_schedule().max_running_requests // configurator.attn_dp_size)
        snapshots = _requests(original, configurator, memory, asked)
        flags = _replay_flags(get_spec().speculative_num_draft_tokens)
        replay = 0
        if why_not is None:
            replay = _requests(original, configurator, memory, asked, **flags)
        if replay > snapshots:
            get_context().override(__name__, **flags)
        _log(configurator, asked, snapshots, replay, why_not)
    return original(configurator, memory)


def _is_open(configurator: KVCacheConfigurator) -> bool:
    """Whether there are gated delta nets and nothing at start has chosen."""
    from sglang.srt.runtime_context import get_exec, get_lora, get_spec

    path, lora = get_spec().speculative_adaptive_config, bool(get_lora().enable_lora)
    return (
        configurator.hybrid_gdn_config is not None
        and configurator.hybrid_kda_config is None
        and not get_exec().mamba.enable_linear_replayssm_spec
        and read_settings(path, lora=lora).rollback is Rollback.AUTO
    )


def _obstacle(configurator: KVCacheConfigurator) -> str | None:
    """Why it must be snapshots; None if replay is possible."""
    import torch
    from sglang.srt.runtime_context import get_exec, get_memory
    from sglang.srt.speculative.ragged_verify import RaggedVerifyMode, read_ragged_verify_mode

    states = configurator.mambaish_config.mamba2_cache_params.dtype.temporal
    if states != torch.float32:
        return f"replay has been compared with states in float32 only, these are {states}"
    if get_memory().enable_unified_memory:
        return "--enable-unified-memory moves the states"
    mamba = get_exec().mamba
    backend = mamba.linear_attn_decode_backend or mamba.linear_attn_backend
    if backend not in _REPLAYING_BACKENDS:
        return f"replay does not go with --linear-attn-decode-backend {backend}"
    ragged = read_ragged_verify_mode()
    if ragged is not RaggedVerifyMode.STATIC:
        return f"replay does not go with SGLANG_RAGGED_VERIFY_MODE={ragged.value}"
    return None


def _replay_flags(block_size: int) -> dict[str, Any]:
    return {
        "enable_linear_replayssm_spec": True,
        "linear_replayssm_cache_len": record_length(block_size),
    }


def _requests(
    division: Division, configurator: KVCacheConfigurator, memory: float, asked: int, **flags: Any
) -> int:
    """Running requests that a division leaves states for, at most `asked`; nothing is changed.

    Args:
        division: SGLang's.
        configurator: its owner.
        memory: GB left beside the weights.
        asked: running requests.
        flags: to divide with.
    """
    from sglang.srt.runtime_context import get_exec, get_schedule

    schedule = get_schedule()
    with ExitStack() as trial:
        trial.enter_context(get_exec().mamba.override(**flags))
        trial.enter_context(schedule.override(max_mamba_cache_size=schedule.max_mamba_cache_size))
        try:
            left = division(configurator, memory)
        except RuntimeError:  # SGLang: not even one state fits
            return 0
        if left <= 0:
            return 0
        return int(
            min(asked, schedule.max_mamba_cache_size // configurator._calculate_mamba_ratio())
        )


def _log(
    configurator: KVCacheConfigurator, asked: int, snapshots: int, replay: int, why_not: str | None
) -> None:
    from sglang.srt.runtime_context import get_parallel, get_spec

    if get_parallel().tp_rank != 0:
        return
    block_size = get_spec().speculative_num_draft_tokens
    params = configurator.mambaish_config.mamba2_cache_params
    # As SGLang reserves them.
    snapshot = params.mamba_cache_per_req * block_size
    record = params.replayssm_ring_bytes_per_req(record_len=record_length(block_size))
    if replay > snapshots:
        logger.info(
            "DFLASH rolls recurrent layers back by replay: with snapshots %d of the %d running "
            "requests asked for would have states, with replay %d have. SGLang sets %.1f MB a "
            "request aside for it instead of %.1f MB: %.1f GB less for %d requests.",
            *(snapshots, asked, replay, record / 1e6, snapshot / 1e6),
            *(replay * (snapshot - record) / 1e9, replay),
        )
        return
    reason = ""
    if snapshots < asked:
        reason = f", because {why_not}" if why_not else ", and replay would hold no more"
    logger.info(
        "DFLASH rolls recurrent layers back by snapshots: %d of the %d running requests asked for "
        "have states%s. SGLang sets %.1f MB a request aside for it.",
        *(snapshots, asked, reason, snapshot / 1e6),
    )
