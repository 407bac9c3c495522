"""The hooks on SGLang: one decides which worker serves, the others are set only when it is ours."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.arg_groups.model_override_base import resolving_view
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

from dflash_sglang.config import WORKER_VARIABLE, WorkerChoice, read_config
from dflash_sglang.errors import ContractError
from dflash_sglang.preflight.pair import PairReport, ServedBy
from dflash_sglang.preflight.rollback import REQUEST_POOL, admit_replay
from dflash_sglang.preflight.server_flags import pair_report, refuse_unsupported_flags
from dflash_sglang.step.finish import finish_token_by_token

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

logger = logging.getLogger(__name__)

_SOURCE = HookSource(plugin_name="dflash", dist_name="dflash_sglang")
CREATE_WORKER = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"
VALIDATE_REQUEST = "sglang.srt.speculative.dflash_utils.validate_dflash_request"
FINISH = "sglang.srt.managers.schedule_batch.Req.update_finish_state"
SEEDED_SAMPLER = "sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch"
INTERNAL_STATE = (
    "sglang.srt.managers.scheduler_components.internal_state"
    ".SchedulerInternalStateController._add_speculative"
)
HEADROOM = "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len"


def install() -> None:
    """Register the hook that every process carries; SGLang applies it after all plugins ran."""
    HookRegistry.register(CREATE_WORKER, create_worker, HookType.AROUND, source=_SOURCE)


def create_worker(
    original: Callable[..., Any], algorithm: SpeculativeAlgorithm, server_args: ServerArgs
) -> Any:
    """AROUND hook on `SpeculativeAlgorithm.create_worker`, which the scheduler calls once.

    Returns:
        Our worker class for DFLASH with a plain DFlash head; otherwise what SGLang answers.

    Raises:
        PairError: the draft checkpoint does not fit the verifier.
        UnsupportedFlagError: a flag that our worker does not serve.
    """
    if not algorithm.is_dflash():
        return original(algorithm, server_args)
    server_flags = resolving_view(server_args)
    report = pair_report(server_flags)
    report.raise_if_bad()
    reason = _reason_for_builtin(report)
    if reason is not None:
        logger.warning("DFLASH is served by SGLang's own worker: %s.", reason)
        return original(algorithm, server_args)
    # The launcher has checked this already, unless it could not read a checkpoint from the hub.
    refuse_unsupported_flags(server_flags)
    _install_worker_hooks()
    from dflash_sglang.step.worker import DFlashWorker

    return DFlashWorker


def _reason_for_builtin(report: PairReport) -> str | None:
    if read_config(os.environ).worker is WorkerChoice.BUILTIN:
        return f"{WORKER_VARIABLE} is {WorkerChoice.BUILTIN.value}"
    # Without a family the checkpoint could not be read here; SGLang has loaded it all the same.
    if report.head_family is not None and report.head_family.served_by is not ServedBy.OURS:
        family = report.head_family.value
        return f"the draft checkpoint is a {family} head, ours serves plain DFlash heads"
    return None


def _install_worker_hooks() -> None:
    """Hooks that only our worker needs, set in the scheduler process before pools are sized."""
    HookRegistry.register(HEADROOM, _headroom, HookType.AFTER, source=_SOURCE)
    HookRegistry.register(VALIDATE_REQUEST, _validate_request, HookType.AROUND, source=_SOURCE)
    HookRegistry.register(FINISH, finish_token_by_token, HookType.AROUND, source=_SOURCE)
    HookRegistry.register(SEEDED_SAMPLER, _draw_alone, HookType.AROUND, source=_SOURCE)
    HookRegistry.register(INTERNAL_STATE, _add_own_state, HookType.AROUND, source=_SOURCE)
    HookRegistry.register(REQUEST_POOL, admit_replay, HookType.AROUND, source=_SOURCE)
    HookRegistry.apply_hooks()
    # apply_hooks only logs a hook that it could not set.
    wanted = {HEADROOM, VALIDATE_REQUEST, FINISH, SEEDED_SAMPLER, INTERNAL_STATE, REQUEST_POOL}
    missing = wanted - HookRegistry._patched
    if missing:
        raise ContractError(
            f"SGLang did not accept the hooks on {', '.join(sorted(missing))}; see the log above. "
            "Run python -m dflash_sglang.check."
        )


def _headroom(result: int) -> int:
    from dflash_sglang.step.state import req_to_token_headroom

    return req_to_token_headroom(result)


def _validate_request(
    original: Callable[..., str | None], req: Req, enable_overlap: bool
) -> str | None:
    from dflash_sglang.step.request_options import disarm, refusal

    reason = refusal(req)
    if reason is not None:
        disarm(req)
    return reason or original(req, enable_overlap)


def _draw_alone(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    from dflash_sglang.step.seeds import draw_unfiltered_alone

    return draw_unfiltered_alone(original, *args, **options)


def _add_own_state(original: Callable[..., None], holder: Any, state: dict[str, Any]) -> None:
    """AROUND hook: what /get_server_info tells of our worker."""
    original(holder, state)
    state["dflash"] = holder.scheduler.draft_worker.internal_state()
