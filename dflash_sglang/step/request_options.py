"""Which requests the worker serves; the others get a 400 that says why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.runtime_context import get_exec

from dflash_sglang.step.draft_limits import wish_problem

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

_INSTEAD = "Leave it out, or send the request to a server without --speculative-algorithm DFLASH."


def refusal(req: Req) -> str | None:
    """Why the request cannot be served, or cannot be served exactly with speculation; else None.

    Args:
        req: a request as the scheduler has received it, sampling parameters normalised.
    """
    return _malformed(req) or wish_problem(req.sampling_params.custom_params) or _inexact(req)


def _malformed(req: Req) -> str | None:
    """Ids outside the vocabulary, which would end the scheduler and everybody's requests."""
    params = req.sampling_params
    named = {"input_ids": req.origin_input_ids}
    if params.min_new_tokens > 0:
        named["stop_token_ids"] = params.stop_token_ids or ()
    for name, ids in named.items():
        if len(ids) > 0 and not 0 <= min(ids) <= max(ids) < req.vocab_size:
            outside = next(i for i in ids if not 0 <= i < req.vocab_size)
            return (
                f"{name} has the token id {outside}, outside the vocabulary of {req.vocab_size}. "
                f"Give ids from 0 to {req.vocab_size - 1}."
            )
    return None


def _inexact(req: Req) -> str | None:
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


def disarm(req: Req) -> None:
    """Take from a refused request what it was refused for.

    SGLang answers a refused request by way of a prefill of one dummy token, whose sampler would
    trip over the same parameters.
    """
    params = req.sampling_params
    params.min_p = 0.0
    params.min_new_tokens = 0
    params.custom_params = None
    req.custom_logit_processor = None
    req.return_hidden_states = False
    req.return_sampling_mask = False
