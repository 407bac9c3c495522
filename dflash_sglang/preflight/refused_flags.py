"""Every server flag and combination of flags that DFLASH does not serve, in one place.

A flag is here only with evidence from the wheel or from our worker: docs/reference/flags.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from dflash_sglang.config import Rollback, Settings, read_settings
from dflash_sglang.preflight.draft_flags import draft_flag_problems
from dflash_sglang.preflight.serving import block_size

_BUILTIN = "DFLASH_SGLANG_WORKER=builtin for SGLang's own worker."


class Flag(NamedTuple):
    """A server flag that is refused with DFLASH unless it has its neutral value."""

    field: str  # of SGLang's ServerArgs
    flag: str
    neutral: object
    why: str
    instead: str
    any_worker: bool = False  # SGLang's own worker cannot serve it either

    def value(self, flags: Any) -> object:
        """What the flags have for it."""
        return getattr(flags, self.field)

    def is_set(self, flags: Any) -> bool:
        """Whether the flags have another value than the neutral one."""
        return self.value(flags) != self.neutral


REFUSED = (
    Flag(
        "pp_size",
        "--pp-size",
        1,
        "DFLASH cannot run over pipeline stages: the taps of all layers are needed in one process",
        "Use --tp-size.",
        any_worker=True,
    ),
    Flag(
        "enable_two_batch_overlap",
        "--enable-two-batch-overlap",
        False,
        "SGLang captures no hidden states while two batches overlap, and the drafter needs them",
        "Leave the flag out.",
    ),
    Flag(
        "enable_pdmux",
        "--enable-pdmux",
        False,
        "prefill multiplexing runs the verifier around the speculative worker, so the drafter "
        "never sees the prompt",
        "Leave the flag out.",
    ),
    Flag(
        "attn_dp_size",
        "--attn-dp-size (or --dp-size with --enable-dp-attention)",
        1,
        "this worker does not draft over data-parallel attention ranks",
        f"Use --dp-size for whole replicas, or {_BUILTIN}",
    ),
    Flag(
        "attn_cp_size",
        "--attn-cp-size",
        1,
        "this worker does not draft over context-parallel ranks",
        f"Use --tp-size, or {_BUILTIN}",
    ),
    Flag(
        "dcp_size",
        "--dcp-size",
        1,
        "this worker does not write draft KV over context-parallel decode ranks",
        f"Use --tp-size, or {_BUILTIN}",
    ),
    Flag(
        "disaggregation_mode",
        "--disaggregation-mode",
        "null",
        "the decode server would continue with SGLang's draft state, which is not this worker's",
        "Serve prefill and decode in one server, or use DFLASH_SGLANG_WORKER=builtin on both.",
    ),
    Flag(
        "enable_linear_replayssm",
        "--enable-linear-replayssm",
        False,
        "it speeds up plain decode steps, of which DFLASH runs none, and keeps committed tokens "
        "out of the states that a verify starts from",
        "Leave the flag out; rollback in the settings file is for speculation.",
    ),
)

# Flags that SGLang accepts with DFLASH although nothing reads them for it.
WITHOUT_EFFECT = tuple(
    Flag(field, f"--{field.replace('_', '-')}", neutral, "", "", any_worker=True)
    for field, neutral in (
        ("speculative_token_map", None),
        ("speculative_draft_sink_size", None),
        ("enable_multi_layer_eagle", False),
    )
)


def applies_lora(flags: Any) -> bool:
    """Whether the server applies LoRA adapters; --lora-paths alone turns that on.

    Args:
        flags: a view with SGLang's flags as attributes, resolved or not.
    """
    return bool(flags.lora_paths if flags.enable_lora is None else flags.enable_lora)


def read_settings_of(flags: Any) -> Settings:
    """The settings file that the flags name, as it is served with them; `flags` as above.

    Raises:
        ConfigError: as `read_settings`.
    """
    return read_settings(flags.speculative_adaptive_config, lora=applies_lora(flags))


def problems_for_any_worker(flags: Any) -> Iterator[str]:
    """What no DFLASH worker serves, a sentence each.

    Args:
        flags: a view with SGLang's flags as attributes.
    """
    if not flags.speculative_draft_model_path:
        yield (
            f"--speculative-draft-model-path (given: {flags.speculative_draft_model_path!r}) must "
            "name a DFlash draft checkpoint. Give its folder or hub name."
        )
    size, width = flags.speculative_dflash_block_size, flags.speculative_num_draft_tokens
    if size is not None and width is not None and size != width:
        yield (
            f"--speculative-dflash-block-size (given: {size}) and --speculative-num-draft-tokens "
            f"(given: {width}) that differ: both are the block size. Give "
            "--speculative-dflash-block-size only."
        )
    window, block = flags.speculative_draft_window_size, block_size(flags)
    if window is not None and block is not None and window < block:
        yield (
            f"--speculative-draft-window-size (given: {window}) is below the block size {block}, "
            f"and a block must see itself. Give {block} or more."
        )
    yield from (
        _sentence(flag, flags) for flag in REFUSED if flag.any_worker and flag.is_set(flags)
    )
    yield from _lora_problems(flags)


def problems_for_our_worker(flags: Any, settings: Settings) -> Iterator[str]:
    """What SGLang's own DFLASH worker would serve and ours does not, a sentence each.

    Args:
        flags: a view with SGLang's flags as attributes.
        settings: the settings file.
    """
    yield from (
        _sentence(flag, flags) for flag in REFUSED if not flag.any_worker and flag.is_set(flags)
    )
    yield from draft_flag_problems(flags)
    yield from _accept_rule_problems(flags)
    yield from _rollback_problems(flags, settings)


def problems_for_sglangs_worker(flags: Any) -> Iterator[str]:
    """What only our worker serves, a sentence each.

    SGLang refuses this itself, except where its refusal was lifted because the draft checkpoint was
    not fetched yet and turned out to be a head for SGLang's own worker.

    Args:
        flags: a view with SGLang's flags as attributes.
    """
    if needs_our_block_verification(flags):
        yield (
            f"--speculative-use-block-verification (given: True) on the device {flags.device}: "
            "SGLang's own worker has it as a CUDA kernel only. Leave the flag out."
        )


def needs_our_block_verification(flags: Any) -> bool:
    """Whether the flags ask for block verification where SGLang's worker has none."""
    return bool(flags.speculative_use_block_verification) and flags.device != "cuda"


def _sentence(flag: Flag, flags: Any) -> str:
    return f"{flag.flag} (given: {flag.value(flags)}): {flag.why}. {flag.instead}"


def _lora_problems(flags: Any) -> Iterator[str]:
    # Without --device it is not known in the launcher; the scheduler checks again.
    captures = flags.device not in (None, "cpu") and not flags.disable_decode_cuda_graph
    if applies_lora(flags) and flags.lora_backend == "torch_native" and captures:
        yield (
            "--lora-backend (given: torch_native) with CUDA graphs: its buffers hold one adapter a "
            "request, and a verify fills in one a token. Leave it out, or give "
            "--disable-decode-cuda-graph."
        )


def _accept_rule_problems(flags: Any) -> Iterator[str]:
    thresholds = {
        "--speculative-accept-threshold-single": flags.speculative_accept_threshold_single,
        "--speculative-accept-threshold-acc": flags.speculative_accept_threshold_acc,
    }
    for flag, value in thresholds.items():
        if not 0 < value <= 1:
            yield (
                f"{flag} (given: {value}) must be above 0 and at most 1. Leave it at 1 to be exact."
            )
    relaxed = next((flag for flag, value in thresholds.items() if value != 1), None)
    sampled = None
    if flags.speculative_use_rejection_sampling:
        sampled = "--speculative-use-rejection-sampling"
    elif flags.speculative_use_block_verification:
        sampled = "--speculative-use-block-verification"
    if sampled and relaxed:
        yield f"{sampled} and {relaxed} are two rules for one decision. Give one."
    inexact = sampled or relaxed
    if inexact and flags.enable_deterministic_inference:
        yield (
            f"{inexact} makes the text depend on the drafts, and --enable-deterministic-inference "
            "promises the text of a seed. Give one."
        )


def _rollback_problems(flags: Any, settings: Settings) -> Iterator[str]:
    replay = flags.enable_linear_replayssm_spec
    if replay and settings.rollback == Rollback.SNAPSHOT:
        yield (
            "--enable-linear-replayssm-spec and rollback 'snapshot' in the settings file are two "
            "answers to one question. Give one."
        )
    if (replay or settings.rollback == Rollback.REPLAY) and flags.enable_unified_memory:
        yield (
            "--enable-unified-memory moves the states that --enable-linear-replayssm-spec (or "
            "rollback 'replay') writes to. Use rollback 'snapshot', or leave it out."
        )
