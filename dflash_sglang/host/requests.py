"""Which requests the worker serves; the others get a 400 that says why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.runtime_context import get_exec

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

_INSTEAD = "Leave it out, or send the request to a server without --speculative-algorithm DFLASH."


def refusal(req: Req) -> str | None:
    """Why the request cannot be served exactly with speculation, or None.

    Args:
        req: a request as the scheduler has received it, sampling parameters normalised.
    """
    if req.custom_logit_processor is not None:
        # It may read the request's output, which at a drafted position is not there yet.
        return f"custom_logit_processor is not supported with DFLASH. {_INSTEAD}"
    if req.return_hidden_states:
        return f"return_hidden_states is not supported with DFLASH. {_INSTEAD}"
    if req.return_sampling_mask:
        return f"return_sampling_mask is not supported with DFLASH. {_INSTEAD}"
    if get_exec().deterministic.enable_deterministic_inference and req.sampling_params.min_p > 0:
        # SGLang's sampler asserts on the combination, which would end the scheduler.
        return (
            f"min_p={req.sampling_params.min_p:g} cannot be combined with a sampling seed, which "
            "--enable-deterministic-inference gives every request. Leave min_p at 0."
        )
    return None
