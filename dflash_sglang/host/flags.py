"""Refusals at start: server flags that DFLASH cannot serve, and pairs that cannot work.

They run in the launcher (or in `sglang.Engine`'s constructor) before SGLang resolves the model
path, through SGLang's own extension point for resolution steps: no process has been started and
nothing was fetched or loaded. docs/check.md lists every decision with its evidence.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dflash_sglang.config import WorkerChoice, read_config
from dflash_sglang.errors import DFlashError, UnsupportedFlagError
from dflash_sglang.host.contract import Name
from dflash_sglang.model.pair import Layout, PairReport, check_pair

logger = logging.getLogger(__name__)

# The first resolution step that touches models; everything before it only normalises flags.
START_STEP = "handle_model_source_paths"
_FIELDS = "sglang.srt.arg_groups.fields"

DRAFT_FLAG = "--speculative-draft-model-path"
BLOCK_FLAG = "--speculative-dflash-block-size"
WINDOW_FLAG = "--speculative-draft-window-size"
WIDTH_FLAG = "--speculative-num-draft-tokens"


class Flag(NamedTuple):
    """A server flag that is refused with DFLASH unless it has its neutral value."""

    field: str  # of SGLang's ServerArgs, "namespace.Class.name" below arg_groups/fields
    flag: str
    neutral: object
    why: str
    instead: str
    any_worker: bool  # SGLang's own worker cannot serve it either


REFUSED: tuple[Flag, ...] = (
    Flag(
        "parallel.Parallel.pp_size",
        "--pp-size",
        1,
        "DFLASH cannot run over pipeline stages: the taps of all layers are needed in one process",
        "Use --tp-size.",
        any_worker=True,
    ),
    Flag(
        "exec_.ExecOverlap.enable_two_batch_overlap",
        "--enable-two-batch-overlap",
        False,
        "SGLang captures no hidden states while two batches overlap, and the drafter needs them",
        "Leave the flag out.",
        any_worker=True,
    ),
    Flag(
        "disagg.Disagg.enable_pdmux",
        "--enable-pdmux",
        False,
        "prefill multiplexing runs the verifier around the speculative worker, so the drafter "
        "never sees the prompt",
        "Leave the flag out.",
        any_worker=True,
    ),
    Flag(
        "parallel.Parallel.attn_dp_size",
        "--attn-dp-size (or --dp-size with --enable-dp-attention)",
        1,
        "this worker does not draft over data-parallel attention ranks",
        "Use --dp-size for whole replicas, or DFLASH_SGLANG_WORKER=builtin for SGLang's own "
        "worker.",
        any_worker=False,
    ),
    Flag(
        "parallel.Parallel.attn_cp_size",
        "--attn-cp-size",
        1,
        "this worker does not draft over context-parallel ranks",
        "Use --tp-size, or DFLASH_SGLANG_WORKER=builtin for SGLang's own worker.",
        any_worker=False,
    ),
    Flag(
        "parallel.Parallel.dcp_size",
        "--dcp-size",
        1,
        "this worker does not write draft KV over context-parallel decode ranks",
        "Use --tp-size, or DFLASH_SGLANG_WORKER=builtin for SGLang's own worker.",
        any_worker=False,
    ),
    Flag(
        "disagg.Disagg.disaggregation_mode",
        "--disaggregation-mode",
        "null",
        "the decode server would continue with SGLang's draft state, which is not this worker's",
        "Serve prefill and decode in one server, or use DFLASH_SGLANG_WORKER=builtin on both.",
        any_worker=False,
    ),
    Flag(
        "spec.Spec.speculative_accept_threshold_single",
        "--speculative-accept-threshold-single",
        1.0,
        "a threshold below 1 accepts drafts the verifier would not have chosen; this worker is "
        "exact",
        "Leave the flag out.",
        any_worker=False,
    ),
    Flag(
        "spec.Spec.speculative_accept_threshold_acc",
        "--speculative-accept-threshold-acc",
        1.0,
        "a threshold below 1 accepts drafts the verifier would not have chosen; this worker is "
        "exact",
        "Leave the flag out.",
        any_worker=False,
    ),
)

# Flags SGLang accepts with DFLASH although nothing reads them for it.
WITHOUT_EFFECT: tuple[Flag, ...] = tuple(
    Flag(f"spec.Spec.{field}", f"--{field.replace('_', '-')}", neutral, "", "", any_worker=True)
    for field, neutral in (
        ("speculative_use_rejection_sampling", False),
        ("speculative_use_block_verification", False),
        ("speculative_token_map", None),
        ("speculative_draft_sink_size", None),
        ("enable_multi_layer_eagle", False),
    )
)

_READ_FIELDS = (
    "spec.Spec.speculative_algorithm",
    "spec.Spec.speculative_draft_model_path",
    "spec.Spec.speculative_draft_model_revision",
    "spec.Spec.speculative_dflash_block_size",
    "spec.Spec.speculative_num_draft_tokens",
    "spec.Spec.speculative_draft_window_size",
    "model.Model.model_path",
    "model.Model.revision",
    "model.Model.load_format",
    "model.Model.json_model_override_args",
    "parallel.Parallel.tp_size",
)

# What this module takes from SGLang, for the contract table.
START_NAMES: tuple[Name, ...] = (
    Name(
        "sglang.srt.arg_groups.resolution_hooks:register_resolution_hook",
        ("name",),
        "refusals at start",
    ),
    Name(
        f"sglang.srt.arg_groups.model_path_hook:{START_STEP}", ("server_args",), "refusals at start"
    ),
    Name(
        "sglang.srt.arg_groups.model_override_base:resolving_view",
        ("server_args",),
        "reading flags",
    ),
    *(
        Name(_FIELDS + "." + field.replace(".", ":", 1), None, "reading flags")
        for field in (*(flag.field for flag in REFUSED + WITHOUT_EFFECT), *_READ_FIELDS)
    ),
)


def install() -> None:
    """Register the check of a start; call it once, from the plugin, in every process."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    register_resolution_hook(START_STEP)(check_before)


def check_before(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Resolution step: check, then resolve as SGLang does.

    Args:
        server_args: the `ServerArgs` in resolution.
        previous: the step this one wraps.

    Raises:
        UnsupportedFlagError, PairError: when SGLang is used as a library.
        SystemExit: from SGLang's own command line, with the error as one line.
    """
    from sglang.srt.arg_groups.model_override_base import resolving_view

    try:
        check_start(resolving_view(server_args), os.environ)
    except DFlashError as problem:
        if _is_command_line():
            raise SystemExit(f"dflash_sglang: {type(problem).__name__}: {problem}") from None
        raise
    previous(server_args)


def check_start(flags: Any, environment: Mapping[str, str]) -> None:
    """Refuse flags and pairs that DFLASH cannot serve; do nothing for other algorithms.

    Args:
        flags: a view with SGLang's flags as attributes.
        environment: the process environment.

    Raises:
        UnsupportedFlagError: a flag or a combination of flags.
        PairError: a drafter that does not fit the verifier.
    """
    if (flags.speculative_algorithm or "").upper() != "DFLASH":
        return
    refuse_unsupported_flags(flags, our_worker=False)
    report = pair_report(flags)
    for finding in report.warnings:
        logger.warning("DFLASH pair: %s", finding)
    report.raise_if_bad()
    ours = report.layout is Layout.PLAIN and read_config(environment).worker is WorkerChoice.DFLASH
    if ours:
        refuse_unsupported_flags(flags)
    for flag in WITHOUT_EFFECT:
        value = _value(flags, flag)
        if value != flag.neutral:
            logger.warning("%s (given: %s) has no effect with DFLASH.", flag.flag, value)


def refuse_unsupported_flags(flags: Any, *, our_worker: bool = True) -> None:
    """Refuse flags that DFLASH does not serve.

    Args:
        flags: a view with SGLang's flags as attributes.
        our_worker: also refuse what SGLang's own DFLASH worker would serve and ours does not.

    Raises:
        UnsupportedFlagError: with every refused flag in one line.
    """
    problems = [*_missing_draft(flags), *_block_problems(flags)]
    problems += [
        f"{flag.flag} (given: {_value(flags, flag)}): {flag.why}. {flag.instead}"
        for flag in REFUSED
        if (our_worker or flag.any_worker) and _value(flags, flag) != flag.neutral
    ]
    if problems:
        raise UnsupportedFlagError(
            "--speculative-algorithm DFLASH does not work with " + " Also: ".join(problems)
        )


def pair_report(flags: Any) -> PairReport:
    """Check the pair that the flags name."""
    return check_pair(
        flags.model_path,
        flags.speculative_draft_model_path,
        block_size(flags),
        tp_size=flags.tp_size,
        with_weights=flags.load_format != "dummy",
        revision=flags.revision,
        draft_revision=flags.speculative_draft_model_revision,
        overrides=json.loads(flags.json_model_override_args or "{}"),
    )


def block_size(flags: Any) -> int | None:
    """The block size the flags ask for, None for the trained one."""
    size = flags.speculative_dflash_block_size
    return flags.speculative_num_draft_tokens if size is None else size


def _missing_draft(flags: Any) -> list[str]:
    if flags.speculative_draft_model_path:
        return []
    return [
        f"no drafter: {DRAFT_FLAG} (given: {flags.speculative_draft_model_path!r}) must name a "
        "DFlash draft checkpoint. Give its folder or hub name."
    ]


def _block_problems(flags: Any) -> list[str]:
    size, width = flags.speculative_dflash_block_size, flags.speculative_num_draft_tokens
    problems = []
    if size is not None and width is not None and size != width:
        problems.append(
            f"{BLOCK_FLAG} (given: {size}) and {WIDTH_FLAG} (given: {width}) that differ: both are "
            f"the block size. Give {BLOCK_FLAG} only."
        )
    window, block = flags.speculative_draft_window_size, block_size(flags)
    if window is not None and block is not None and window < block:
        problems.append(
            f"{WINDOW_FLAG} (given: {window}) below the block size {block}: a block must see "
            f"itself. Give {block} or more."
        )
    return problems


def _value(flags: Any, flag: Flag) -> object:
    return getattr(flags, flag.field.rpartition(".")[2])


def _is_command_line() -> bool:
    """Whether this is one of SGLang's launchers, whose user wants a line and not a traceback."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:
        return str(spec.name).startswith("sglang.")
    return Path(sys.argv[0]).stem == "sglang"
