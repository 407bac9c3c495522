"""Which requests the worker serves. One it cannot serve exactly is answered with a 400 that says why."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

_INSTEAD = "Send it to a server without --speculative-algorithm DFLASH."


def refusal(req: Req) -> str | None:
    """Why the request cannot be served with speculation, or None.

    Args:
        req: a request as the scheduler has received it, sampling parameters normalised (temperature 0 is
            top_k 1).
    """
    params = req.sampling_params
    if params.top_k != 1:
        return (
            f"temperature {params.temperature:g} with top_k {params.top_k} asks for sampling, and this DFLASH "
            f"worker decodes greedily. Set temperature to 0. {_INSTEAD}"
        )
    for name, neutral in (
        ("repetition_penalty", 1.0),
        ("frequency_penalty", 0.0),
        ("presence_penalty", 0.0),
        ("min_new_tokens", 0),
    ):
        value = getattr(params, name)
        if value != neutral:
            return (
                f"{name}={value:g} is not supported by this DFLASH worker: it would have to be counted along "
                f"the drafted block. Leave it at {neutral:g}. {_INSTEAD}"
            )
    if req.custom_logit_processor is not None:
        return f"custom_logit_processor is not supported by this DFLASH worker. {_INSTEAD}"
    if req.return_hidden_states:
        return f"return_hidden_states is not supported by this DFLASH worker. {_INSTEAD}"
    if req.return_sampling_mask:
        return f"return_sampling_mask is not supported by this DFLASH worker. {_INSTEAD}"
    return None
