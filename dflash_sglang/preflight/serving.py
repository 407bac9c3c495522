"""Which worker serves DFLASH: the one answer that everything decided before a start goes by.

The checks at start, the resolution steps, the rollback choice, the hook on SGLang's worker and
`python -m dflash_sglang.check` all call `serving_worker`; none of them looks at the head family or
at DFLASH_SGLANG_WORKER itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from dflash_sglang.config import WORKER_VARIABLE, WorkerChoice, read_worker_choice
from dflash_sglang.errors import UnsupportedFlagError
from dflash_sglang.preflight.draft_flags import has_draft_weights
from dflash_sglang.preflight.pair import (
    HeadFamily,
    PairReport,
    ServedBy,
    check_pair,
    draft_head_family,
)


class Serving(NamedTuple):
    """Which worker serves, and why."""

    worker: ServedBy
    reason: str
    # The draft checkpoint cannot be read here yet. The scheduler decides again once SGLang has
    # fetched it, so nothing may be refused on this ground.
    assumed: bool = False

    @property
    def ours(self) -> bool:
        """Whether the worker of this package serves."""
        return self.worker is ServedBy.OURS


def serving_worker(family: HeadFamily | None, environment: Mapping[str, str]) -> Serving:
    """Decide which worker serves a draft head under `--speculative-algorithm DFLASH`.

    Args:
        family: of the draft head; None where its config.json could not be read.
        environment: the process environment.

    Raises:
        ConfigError: DFLASH_SGLANG_WORKER has a value that it does not take.
    """
    choice = read_worker_choice(environment)
    if family is not None and family.served_by is ServedBy.UNSUPPORTED:
        return Serving(ServedBy.UNSUPPORTED, f"the draft checkpoint is a {family} head")
    if choice is WorkerChoice.BUILTIN:
        return Serving(ServedBy.SGLANG, f"{WORKER_VARIABLE}={choice}")
    if family is None:
        reason = "for plain DFlash heads; other heads go to SGLang's own worker"
        return Serving(ServedBy.OURS, reason, assumed=True)
    if family.served_by is ServedBy.OURS:
        return Serving(ServedBy.OURS, f"the draft checkpoint is a {family} head")
    reason = f"the draft checkpoint is a {family} head, ours serves plain DFlash heads"
    return Serving(ServedBy.SGLANG, reason)


def serving_with(flags: Any, environment: Mapping[str, str]) -> Serving:
    """`serving_worker` for server flags; any other speculative algorithm is SGLang's.

    Args:
        flags: a view with SGLang's flags as attributes.
        environment: the process environment.

    Raises:
        ConfigError: as `serving_worker`.
        UnsupportedFlagError: --json-model-override-args is not a JSON object.
    """
    if not is_dflash(flags):
        algorithm = flags.speculative_algorithm
        return Serving(ServedBy.SGLANG, f"--speculative-algorithm is {algorithm}")
    family = None
    if flags.speculative_draft_model_path:
        family = draft_head_family(
            flags.speculative_draft_model_path,
            revision=flags.speculative_draft_model_revision,
            with_weights=has_draft_weights(flags),
            overrides=_overrides(flags),
        )
    return serving_worker(family, environment)


def is_dflash(flags: Any) -> bool:
    """Whether the flags select DFLASH, in any spelling that SGLang takes."""
    return (flags.speculative_algorithm or "").upper() == "DFLASH"


def pair_report(flags: Any) -> PairReport:
    """Check the pair that the flags name."""
    return check_pair(
        flags.model_path,
        flags.speculative_draft_model_path,
        block_size(flags),
        tp_size=flags.tp_size,
        with_weights=_has_weights(flags),
        with_draft_weights=has_draft_weights(flags),
        revision=flags.revision,
        draft_revision=flags.speculative_draft_model_revision,
        overrides=_overrides(flags),
    )


def block_size(flags: Any) -> int | None:
    """The block size that the flags give, None for the trained one."""
    size: int | None = flags.speculative_dflash_block_size
    width: int | None = flags.speculative_num_draft_tokens
    return width if size is None else size


def _has_weights(flags: Any) -> bool:
    return bool(flags.load_format != "dummy")


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
