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
from typing import Any

from dflash_sglang.config import WorkerChoice, read_config, read_settings
from dflash_sglang.errors import DFlashError, UnsupportedFlagError
from dflash_sglang.preflight.accept_rule_flags import (
    SPECULATIVE_STEP,
    admit_block_verification,
    rule_problems,
)
from dflash_sglang.preflight.pair import HeadFamily, PairReport, check_pair, numbered
from dflash_sglang.preflight.refused_flags import REFUSED, START_STEP, WITHOUT_EFFECT, Flag
from dflash_sglang.preflight.rollback import (
    LINEAR_STEP,
    choose_rollback,
    rollback_problems,
    size_record,
)

logger = logging.getLogger(__name__)

DRAFT_FLAG = "--speculative-draft-model-path"
BLOCK_FLAG = "--speculative-dflash-block-size"
WINDOW_FLAG = "--speculative-draft-window-size"
WIDTH_FLAG = "--speculative-num-draft-tokens"


def install() -> None:
    """Register our resolution steps; call it once, from the plugin, in every process."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    register_resolution_hook(START_STEP)(check_before)
    register_resolution_hook(SPECULATIVE_STEP)(admit_block_verification)
    register_resolution_hook(LINEAR_STEP)(choose_rollback)
    register_resolution_hook(SPECULATIVE_STEP)(size_record)


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
        ConfigError: the settings file.
    """
    if (flags.speculative_algorithm or "").upper() != "DFLASH":
        return
    refuse_unsupported_flags(flags, our_worker=False)
    report = pair_report(flags)
    for finding in report.warnings:
        logger.warning("DFLASH pair: %s", finding)
    report.raise_if_bad()
    ours = (
        report.head_family is HeadFamily.PLAIN
        and read_config(environment).worker is WorkerChoice.DFLASH
    )
    if ours:
        refuse_unsupported_flags(flags)
        settings, size = read_settings(flags.speculative_adaptive_config), block_size(flags)
        if size is not None:  # else the checkpoint's, which the worker compares
            settings.width_settings(size)
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
    if our_worker:
        problems += rule_problems(flags)
        problems += rollback_problems(flags, read_settings(flags.speculative_adaptive_config))
    if problems:
        raise UnsupportedFlagError(
            f"--speculative-algorithm DFLASH cannot start: {numbered(problems)}"
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
        overrides=_overrides(flags),
    )


def block_size(flags: Any) -> int | None:
    """The block size the flags ask for, None for the trained one."""
    size: int | None = flags.speculative_dflash_block_size
    width: int | None = flags.speculative_num_draft_tokens
    return width if size is None else size


def _overrides(flags: Any) -> dict[str, Any]:
    text = flags.json_model_override_args or "{}"
    try:
        overrides = json.loads(text)
    except json.JSONDecodeError as problem:
        raise UnsupportedFlagError(
            f"--json-model-override-args (given: {text}) is not JSON: {problem}. Give an object."
        ) from None
    if not isinstance(overrides, dict):
        raise UnsupportedFlagError(
            f"--json-model-override-args (given: {text}) is not a JSON object. Give an object."
        )
    return overrides


def _missing_draft(flags: Any) -> list[str]:
    if flags.speculative_draft_model_path:
        return []
    return [
        f"{DRAFT_FLAG} (given: {flags.speculative_draft_model_path!r}) must name a DFlash draft "
        "checkpoint. Give its folder or hub name."
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
            f"{WINDOW_FLAG} (given: {window}) is below the block size {block}, and a block must "
            f"see itself. Give {block} or more."
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
