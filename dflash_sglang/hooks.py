"""The hooks on SGLang: one decides which worker serves, the others are set only when it is ours."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.arg_groups.model_override_base import resolving_view
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

from dflash_sglang.errors import ContractError
from dflash_sglang.preflight.rollback import allow_replay
from dflash_sglang.preflight.rollback_by_memory import divide_memory
from dflash_sglang.preflight.server_flags import refuse_unsupported_flags
from dflash_sglang.preflight.serving import pair_report, serving_worker

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

logger = logging.getLogger(__name__)

_SOURCE = HookSource(plugin_name="dflash", dist_name="dflash_sglang")
_SRT = "sglang.srt"


class Hook(NamedTuple):
    """One hook on one SGLang function."""

    target: str  # dotted path
    kind: HookType
    function: Callable[..., Any]
    why: str


def create_worker(
    original: Callable[..., Any], algorithm: SpeculativeAlgorithm, server_args: ServerArgs
) -> Any:
    """Return our worker class where it serves, else what SGLang returns.

    The scheduler calls it once, when SGLang has fetched both checkpoints.

    Raises:
        PairError: the draft checkpoint does not fit the verifier.
        UnsupportedFlagError: a flag that the worker which serves does not serve.
        ConfigError: the settings file or DFLASH_SGLANG_WORKER.
    """
    if not algorithm.is_dflash():
        return original(algorithm, server_args)
    server_flags = resolving_view(server_args)
    report = pair_report(server_flags)
    report.raise_if_bad()
    # SGLang loads a checkpoint that cannot be read here, so an assumed head is taken as it is.
    serving = serving_worker(report.head_family, os.environ)
    # The launcher has checked this already, unless it could not read a checkpoint from the hub.
    refuse_unsupported_flags(server_flags, serving)
    if not serving.ours:
        logger.warning("DFLASH is served by SGLang's own worker: %s.", serving.reason)
        return original(algorithm, server_args)
    apply(WORKER_HOOKS)
    from dflash_sglang.step.worker import DFlashWorker

    return DFlashWorker


def headroom(result: int) -> int:
    """Add what a request's row needs past the context to what SGLang adds."""
    from dflash_sglang.step.state import req_to_token_headroom

    return req_to_token_headroom(result)


def validate_request(
    original: Callable[..., str | None], req: Req, enable_overlap: bool
) -> str | None:
    """Return why a request is refused; SGLang answers it with a 400."""
    from dflash_sglang.step.request_options import clear_rejected_options, refusal

    reason = refusal(req)
    if reason is not None:
        clear_rejected_options(req)
    return reason or original(req, enable_overlap)


def finish(original: Callable[..., None], req: Req, new_accepted_len: int = 1) -> None:
    """Look for the end of a request token by token."""
    from dflash_sglang.step.end_of_request import finish_token_by_token

    finish_token_by_token(original, req, new_accepted_len)


def draw_seeded(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Draw the rows of a seeded batch that filter nothing apart from the others."""
    from dflash_sglang.step.verifier_sampling import draw_unfiltered_alone

    return draw_unfiltered_alone(original, *args, **options)


def route_bounded(original: Callable[..., Any], batch: ForwardBatch) -> Any:
    """Send the tokens of a single request's verify to experts up to its bound."""
    from dflash_sglang.step.draft.narrowing import routed_tokens

    tokens = routed_tokens(batch)
    return original(batch) if tokens is None else tokens


def add_internal_state(original: Callable[..., None], holder: Any, state: dict[str, Any]) -> None:
    """Add what /get_server_info returns about our worker."""
    original(holder, state)
    state["dflash"] = holder.scheduler.draft_worker.internal_state()


_CONFIGURATOR = f"{_SRT}.mem_cache.kv_cache_configurator.KVCacheConfigurator"
REQUEST_POOL = f"{_CONFIGURATOR}._build_hybrid_req_pool"

# Set in every process.
PROCESS_HOOKS = (
    Hook(
        f"{_SRT}.speculative.spec_info.SpeculativeAlgorithm.create_worker",
        HookType.AROUND,
        create_worker,
        "decides which worker serves DFLASH",
    ),
)
# Set in the scheduler process, before its pools are sized, and only where our worker serves.
WORKER_HOOKS = (
    Hook(
        f"{_SRT}.mem_cache.allocation_sizing.get_req_to_token_extra_context_len",
        HookType.AFTER,
        headroom,
        "two blocks are reserved past the context",
    ),
    Hook(
        f"{_SRT}.speculative.dflash_utils.validate_dflash_request",
        HookType.AROUND,
        validate_request,
        "requests are refused for what our worker does not serve",
    ),
    Hook(
        f"{_SRT}.managers.schedule_batch.Req.update_finish_state",
        HookType.AROUND,
        finish,
        "the first stop among several accepted tokens ends the request",
    ),
    Hook(
        f"{_SRT}.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch",
        HookType.AROUND,
        draw_seeded,
        "a seeded draw does not depend on the other requests of the batch",
    ),
    Hook(
        f"{_SRT}.model_executor.forward_batch_info.ForwardBatch.moe_num_token_non_padded",
        HookType.AROUND,
        route_bounded,
        "drafts that are not worth verifying read no experts",
    ),
    Hook(
        f"{_SRT}.managers.scheduler_components.internal_state"
        ".SchedulerInternalStateController._add_speculative",
        HookType.AROUND,
        add_internal_state,
        "our settings and counters are part of /get_server_info",
    ),
    Hook(
        REQUEST_POOL,
        HookType.AROUND,
        allow_replay,
        "it refuses replay with DFLASH, for SGLang's own worker",
    ),
    Hook(
        f"{_CONFIGURATOR}._handle_max_mamba_cache",
        HookType.AROUND,
        divide_memory,
        "rollback 'auto' depends on how many requests have states",
    ),
)


def install() -> None:
    """Register the hook of every process; SGLang applies it after all plugins ran."""
    for hook in PROCESS_HOOKS:
        HookRegistry.register(hook.target, hook.function, hook.kind, source=_SOURCE)


def apply(hooks: tuple[Hook, ...]) -> None:
    """Register hooks and put them in place.

    Raises:
        ContractError: SGLang did not set one of them; it only logs that.
    """
    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, hook.kind, source=_SOURCE)
    HookRegistry.apply_hooks()
    missing = {hook.target for hook in hooks} - HookRegistry._patched
    if missing:
        raise ContractError(
            f"SGLang did not accept the hooks on {', '.join(sorted(missing))}; see the log above. "
            "Run python -m dflash_sglang.check."
        )
