"""The checks at start, and the resolution steps of SGLang that this package wraps.

They run in the launcher (or in `sglang.Engine`'s constructor) through SGLang's own extension point
for resolution steps. The check comes before SGLang resolves the model path: no process has been
started and nothing was fetched or loaded. docs/reference/flags.md lists every decision with its
evidence.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dflash_sglang.errors import DFlashError, UnsupportedFlagError
from dflash_sglang.preflight.pair import numbered
from dflash_sglang.preflight.refused_flags import (
    WITHOUT_EFFECT,
    needs_our_block_verification,
    problems_for_any_worker,
    problems_for_our_worker,
    problems_for_sglangs_worker,
    read_settings_of,
)
from dflash_sglang.preflight.rollback import choose_rollback, size_record
from dflash_sglang.preflight.serving import (
    Serving,
    block_size,
    is_dflash,
    pair_report,
    serving_with,
    serving_worker,
)

logger = logging.getLogger(__name__)


def install() -> None:
    """Wrap SGLang's resolution steps; call it once, from the plugin, in every process."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    # The first step that touches models; everything before it only normalises flags.
    register_resolution_hook("handle_model_source_paths")(check_before)
    register_resolution_hook("handle_linear_attn_backend")(choose_rollback)
    register_resolution_hook("handle_speculative_decoding")(allow_block_verification)
    register_resolution_hook("handle_speculative_decoding")(size_record)


def check_before(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Resolution step: check, then resolve as SGLang does.

    Args:
        server_args: the `ServerArgs` in resolution.
        previous: the step this one wraps.

    Raises:
        UnsupportedFlagError, PairError, ConfigError: when SGLang is used as a library.
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


def allow_block_verification(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Resolution step: let block verification through without CUDA where our worker serves.

    SGLang's own workers have it as a CUDA kernel only, so this step refuses other devices. Ours
    runs on every device; where SGLang's own worker serves, the refusal stands.

    Args:
        server_args: the `ServerArgs` in resolution.
        previous: the step this one wraps.
    """
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.arg_groups.overrides import declare_resolution

    flags = resolving_view(server_args)
    hidden = needs_our_block_verification(flags) and serving_with(flags, os.environ).ours
    if hidden:
        declare_resolution(server_args, __name__, speculative_use_block_verification=False)
    previous(server_args)
    if hidden:
        declare_resolution(server_args, __name__, speculative_use_block_verification=True)


def check_start(flags: Any, environment: Mapping[str, str]) -> None:
    """Refuse flags and pairs that DFLASH cannot serve; do nothing for other algorithms.

    Args:
        flags: a view with SGLang's flags as attributes.
        environment: the process environment.

    Raises:
        UnsupportedFlagError: a flag or a combination of flags.
        PairError: a drafter that does not fit the verifier.
        ConfigError: the settings file or DFLASH_SGLANG_WORKER.
    """
    if not is_dflash(flags):
        return
    _refuse(list(problems_for_any_worker(flags)))
    report = pair_report(flags)
    for finding in report.warnings:
        logger.warning("DFLASH pair: %s", finding)
    report.raise_if_bad()
    serving = serving_worker(report.head_family, environment)
    if serving.ours and not serving.assumed:
        refuse_unsupported_flags(flags, serving)
        size = block_size(flags)
        if size is not None:  # else the checkpoint's, which the worker compares
            read_settings_of(flags).width_settings(size)
    for flag in WITHOUT_EFFECT:
        if flag.is_set(flags):
            logger.warning(
                "%s (given: %s) has no effect with DFLASH.", flag.flag, flag.value(flags)
            )


def refuse_unsupported_flags(flags: Any, serving: Serving) -> None:
    """Refuse flags that the worker which serves DFLASH does not serve.

    Args:
        flags: a view with SGLang's flags as attributes.
        serving: which worker that is.

    Raises:
        UnsupportedFlagError: with every refused flag in one line.
        ConfigError: the settings file.
    """
    problems = list(problems_for_any_worker(flags))
    if serving.ours:
        problems += problems_for_our_worker(flags, read_settings_of(flags))
    else:
        problems += problems_for_sglangs_worker(flags)
    _refuse(problems)


def _refuse(problems: list[str]) -> None:
    if problems:
        raise UnsupportedFlagError(
            f"--speculative-algorithm DFLASH cannot start: {numbered(problems)}"
        )


def _is_command_line() -> bool:
    """Whether this is one of SGLang's launchers, whose user wants a line and not a traceback."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:
        return str(spec.name).startswith("sglang.")
    return Path(sys.argv[0]).stem == "sglang"
