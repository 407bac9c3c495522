"""Settings of this package that no SGLang flag covers.

Which worker serves is an environment variable, because it is a property of the process; everything
else is one JSON file, given with SGLang's --speculative-adaptive-config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from dflash_sglang.core.width import WidthSettings
from dflash_sglang.errors import ConfigError
from dflash_sglang.json_values import as_int, read_object

# The line with which our worker starts in the server's log; scripts recognise it by this.
READY = "DFLASH worker of dflash_sglang ready"
WORKER_VARIABLE = "DFLASH_SGLANG_WORKER"
SETTINGS_FLAG = "--speculative-adaptive-config"
MAX_TOP_K = 32  # of the op that finds them


class WorkerChoice(StrEnum):
    """Which worker serves `--speculative-algorithm DFLASH`."""

    DFLASH = "dflash"
    BUILTIN = "builtin"


class WidthChoice(StrEnum):
    """How the verify width of a step is chosen."""

    ADAPTIVE = "adaptive"  # by measured cost and acceptance
    FIXED = "fixed"  # always the widest allowed


class OpsChoice(StrEnum):
    """Which form of our device ops runs on CUDA."""

    TRITON = "triton"  # after a self-test at start
    REFERENCE = "reference"  # torch only


class Rollback(StrEnum):
    """How the recurrent layers of a hybrid verifier undo rejected tokens."""

    AUTO = "auto"  # replay on a CPU, and on a GPU where snapshots hold too few requests
    REPLAY = "replay"  # what each token changes is recorded, and replayed as far as accepted
    SNAPSHOT = "snapshot"  # the state after each token is kept


def read_worker_choice(environment: Mapping[str, str]) -> WorkerChoice:
    """Read DFLASH_SGLANG_WORKER.

    Args:
        environment: usually `os.environ`.

    Raises:
        ConfigError: the variable has a value that it does not take.
    """
    value = environment.get(WORKER_VARIABLE, WorkerChoice.DFLASH)
    if value not in list(WorkerChoice):
        raise ConfigError(
            f"{WORKER_VARIABLE} is {value!r}. Set it to one of {', '.join(WorkerChoice)}, or "
            "unset it."
        )
    return WorkerChoice(value)


class _Values(NamedTuple):
    """What a key of the settings file takes."""

    wanted: str  # for the error: "Give ..."
    fits: Callable[[object], bool]


def _choice(options: type[StrEnum]) -> _Values:
    listed = ", ".join(repr(option.value) for option in options)
    return _Values(f"one of {listed}", lambda value: value in list(options))


def _integer(wanted: str, low: int, high: int) -> _Values:
    return _Values(wanted, lambda value: _is_int(value, low, high))


def _number(wanted: str, high: float, *, zero: bool = False) -> _Values:
    """Above 0, or from 0 on, and at most `high`."""

    def fits(value: object) -> bool:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return False
        return 0 < value <= high or (zero and value == 0)

    return _Values(wanted, fits)


def _is_int(value: object, low: int, high: int) -> bool:
    number = as_int(value)
    return number is not None and low <= number <= high


# Every key of the settings file and what it takes. A key of the width is a field of WidthSettings,
# any other a field of Settings; both are where its default stands.
_KEYS: dict[str, _Values] = {
    "width": _choice(WidthChoice),
    "widths": _Values(
        "a list of integers from 1 on",
        lambda value: (
            isinstance(value, list | tuple)
            and len(value) > 0
            and all(_is_int(width, 1, 1024) for width in value)
        ),
    ),
    "min_width": _integer("an integer from 1 on", 1, 1024),
    "max_width": _Values(
        "an integer from 1 on, or null for the block size",
        lambda value: value is None or _is_int(value, 1, 1024),
    ),
    "half_life": _number("a number of steps above 0", 1e9),
    "hysteresis": _number("0 or a share", 1, zero=True),
    "explore_share": _number("a share above 0", 0.5),
    "narrow_cuda_graph_max_bs": _integer("an integer from 0 on", 0, 65536),
    "narrow": _Values("true or false", lambda value: isinstance(value, bool)),
    "draft_temperature": _number("a number above 0 and at most 10", 10),
    "draft_top_k": _integer(f"an integer from 1 to {MAX_TOP_K}", 1, MAX_TOP_K),
    "ops": _choice(OpsChoice),
    "rollback": _choice(Rollback),
}


@dataclass(frozen=True)
class Settings(WidthSettings):
    """What the settings file may hold; the defaults are what a server without one uses.

    The inherited fields are the limits and knobs of the verify width.

    Raises:
        ConfigError: a field has an impossible value.
    """

    width: WidthChoice = WidthChoice.ADAPTIVE
    # Largest batch size of CUDA graphs of widths between the ends; docs/results/width.md
    narrow_cuda_graph_max_bs: int = 256
    narrow: bool = True  # end a single request's verify where drafts look bad; docs/method/width.md
    draft_temperature: float = 0.3  # above 0; docs/results/exactness.md
    draft_top_k: int = 16  # tokens a sampled draft is drawn from, 1 .. MAX_TOP_K
    ops: OpsChoice = OpsChoice.TRITON  # on CUDA; elsewhere it is always the reference
    rollback: Rollback = Rollback.AUTO  # docs/method/recurrent-state.md

    def __post_init__(self) -> None:
        for key, values in _KEYS.items():
            given = getattr(self, key)
            if not values.fits(given):
                raise ConfigError(f"{key} is {given!r}. Give {values.wanted}.")
        # As they are declared: JSON has lists and strings.
        for key, kind in {
            "widths": tuple,
            "width": WidthChoice,
            "ops": OpsChoice,
            "rollback": Rollback,
        }.items():
            object.__setattr__(self, key, kind(getattr(self, key)))

    def width_settings(self, block_size: int) -> WidthSettings:
        """The width's part; a fixed width is a ladder of one.

        Raises:
            ConfigError: the limits contradict each other or the block size.
        """
        chosen = {field.name: getattr(self, field.name) for field in fields(WidthSettings)}
        widest = block_size if self.max_width is None else self.max_width
        chosen["max_width"] = widest
        if self.width is WidthChoice.FIXED:
            chosen["min_width"] = widest
        settings = WidthSettings(**chosen)
        settings.ladder(block_size)
        return settings

    def __str__(self) -> str:
        return ", ".join(f"{key}={getattr(self, key)}" for key in _KEYS)


def read_settings(path: str | None, *, lora: bool) -> Settings:
    """Read the settings file.

    Args:
        path: value of --speculative-adaptive-config; None for the defaults.
        lora: whether the server applies LoRA adapters. Then every step has the block's width.

    Raises:
        ConfigError: the file cannot be read, has an unknown key or an impossible value, or asks for
            another width than the block's with LoRA.
    """
    if path is None:
        return Settings(width=WidthChoice.FIXED) if lora else Settings()
    try:
        given = read_object(Path(path), ConfigError)
    except ConfigError as problem:
        raise ConfigError(
            f"{SETTINGS_FLAG} cannot be read: {problem}. Give a file with a JSON object."
        ) from None
    unknown = sorted(set(given) - set(_KEYS))
    if unknown:
        raise ConfigError(
            f"{SETTINGS_FLAG} {path} has the unknown key {unknown[0]!r}. Known keys: "
            f"{', '.join(_KEYS)}."
        )
    try:
        settings = Settings(**given)
        return _of_one_width(settings, given) if lora else settings
    except ConfigError as problem:
        raise ConfigError(f"{SETTINGS_FLAG} {path}: {problem}") from None


def _of_one_width(settings: Settings, given: Mapping[str, object]) -> Settings:
    """The settings with LoRA: one width, the block's.

    Making a width's CUDA graphs, SGLang replaces the buffers from which all graphs of the verifier
    read which row has which adapter, so graphs of two widths cannot both be right.

    Args:
        settings: as given.
        given: the file's keys and values.

    Raises:
        ConfigError: a key asks for something else.
    """
    # A fixed width is `max_width`, whatever the other two.
    fixed = settings.width is WidthChoice.FIXED
    for key in ("max_width",) if fixed else ("width", "widths", "min_width", "max_width"):
        if given.get(key) is not None:
            raise ConfigError(
                f"{key} is {given[key]!r}, and with LoRA every step has the width of the block. "
                'Give "width": "fixed" and no max_width; for a narrower block '
                "--speculative-dflash-block-size; or serve without LoRA."
            )
    return replace(settings, width=WidthChoice.FIXED)
