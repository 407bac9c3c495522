"""Options of a request: refusals, its own settings, and how many tokens a step may commit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sglang.srt.runtime_context import get_exec, get_spec

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.managers.schedule_batch import Req

REQUEST_KEY = "dflash"  # in custom_params of a request's sampling parameters
_INSTEAD = "Leave it out, or send the request to a server without --speculative-algorithm DFLASH."


def max_commit(req: Req) -> int | None:
    """Most tokens that a request may commit in a step, 1 for no speculation; None for no limit.

    A custom logit processor may read the output so far and keep state, so it is called once per
    committed token, as without speculation. Everything else is the request's own option.
    """
    if req.custom_logit_processor is not None:
        return 1
    options = (req.sampling_params.custom_params or {}).get(REQUEST_KEY)
    if options is None:
        return None
    return 1 if not options.get("speculative", True) else options.get("max_width")


def draft_range(draft_config: Any, verifier_config: ModelConfig) -> int | None:
    """Positions the drafter was made for; None when no request can get past them.

    Args:
        draft_config: the drafter's own config.json.
        verifier_config: SGLang's view of the verifier.
    """
    positions: int | None = getattr(draft_config, "max_position_embeddings", None)
    # The last block of a request reaches past the context by its rejected drafts.
    reached = verifier_config.context_len + get_spec().speculative_num_draft_tokens
    return None if positions is None or positions >= reached else positions


def refusal(req: Req) -> str | None:
    """Why a request cannot be served, or not exactly with speculation; None if it can.

    Args:
        req: a request as the scheduler has received it, sampling parameters normalised.
    """
    return _malformed(req) or options_problem(req.sampling_params.custom_params) or _not_exact(req)


def options_problem(custom_params: Mapping[str, Any] | None) -> str | None:
    """What is wrong with a request's options; None when nothing is.

    Args:
        custom_params: of the request's sampling parameters.
    """
    options = (custom_params or {}).get(REQUEST_KEY)
    if options is None:
        return None
    if not isinstance(options, dict) or not set(options) <= {"max_width", "speculative"}:
        given = options
    elif not isinstance(options.get("speculative", True), bool):
        given = options["speculative"]
    elif type(options.get("max_width", 1)) is not int or options.get("max_width", 1) < 1:
        given = options["max_width"]
    else:
        return None
    return (
        f"custom_params[{REQUEST_KEY!r}] has {given!r}. Give an object with "
        '"max_width", an integer from 1 on, and "speculative", true or false; each may be left out.'
    )


def clear_rejected_options(req: Req) -> None:
    """Remove from a refused request what it was refused for.

    SGLang answers a refused request by way of a prefill of one dummy token, whose sampler would
    fail on the same parameters.
    """
    params = req.sampling_params
    params.min_p = 0.0
    params.min_new_tokens = 0
    params.custom_params = None
    req.custom_logit_processor = None
    req.return_hidden_states = False
    req.return_sampling_mask = False


def _malformed(req: Req) -> str | None:
    """Ids outside the vocabulary, which would end the scheduler and every request with it."""
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


def _not_exact(req: Req) -> str | None:
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
