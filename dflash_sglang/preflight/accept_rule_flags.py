"""The flags that choose the accept rule, and what they cannot be combined with."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from dflash_sglang.config import WorkerChoice, read_config

# The resolution step that refuses block verification outside CUDA, for SGLang's own workers.
SPECULATIVE_STEP = "handle_speculative_decoding"
_SINGLE, _ACC = "--speculative-accept-threshold-single", "--speculative-accept-threshold-acc"
_BLOCK, _TOKEN = "--speculative-use-block-verification", "--speculative-use-rejection-sampling"
_SEEDS = "--enable-deterministic-inference"


def rule_problems(flags: Any) -> list[str]:
    """What is wrong with the flags of the accept rule, a sentence each.

    Args:
        flags: a view with SGLang's flags as attributes.
    """
    thresholds = {
        _SINGLE: flags.speculative_accept_threshold_single,
        _ACC: flags.speculative_accept_threshold_acc,
    }
    problems = [
        f"{flag} (given: {value}) must be above 0 and at most 1. Leave it at 1 to be exact."
        for flag, value in thresholds.items()
        if not 0 < value <= 1
    ]
    relaxed = next((flag for flag, value in thresholds.items() if value != 1), None)
    sampled = _BLOCK if flags.speculative_use_block_verification else None
    sampled = _TOKEN if flags.speculative_use_rejection_sampling else sampled
    if sampled and relaxed:
        problems.append(f"{sampled} and {relaxed} are two rules for one decision. Give one.")
    changing = sampled or relaxed
    if changing and flags.enable_deterministic_inference:
        problems.append(
            f"{changing} makes the text depend on the drafts, and {_SEEDS} promises the text of a "
            "seed. Give one."
        )
    return problems


def admit_block_verification(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Resolution step: let block verification through where there is no CUDA.

    SGLang's own workers have it as a CUDA kernel only, so its check refuses other devices. Ours
    runs on every device; for SGLang's own worker the refusal stands.

    Args:
        server_args: the `ServerArgs` in resolution.
        previous: the step this one wraps.
    """
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.arg_groups.overrides import declare_resolution

    flags = resolving_view(server_args)
    ours = (flags.speculative_algorithm or "").upper() == "DFLASH" and read_config(
        os.environ
    ).worker is WorkerChoice.DFLASH
    hidden = ours and flags.device != "cuda" and flags.speculative_use_block_verification
    if hidden:
        declare_resolution(server_args, __name__, speculative_use_block_verification=False)
    previous(server_args)
    if hidden:
        declare_resolution(server_args, __name__, speculative_use_block_verification=True)
