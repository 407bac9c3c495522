"""Settings of this package that no SGLang flag covers.

Which worker serves is an environment variable, because it is a property of the process; everything
else is one JSON file, given with SGLang's --speculative-adaptive-config.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any

from dflash_sglang.core.width import WidthSettings
from dflash_sglang.errors import ConfigError

# How our worker announces itself in the server's log; scripts tell it from SGLang's own by this.
READY = "DFLASH worker of dflash_sglang ready"
WORKER_VARIABLE = "DFLASH_SGLANG_WORKER"
SETTINGS_FLAG = "--speculative-adaptive-config"
MAX_TOP_K = 32  # of the op that finds them


class WorkerChoice(Enum):
    """Which worker serves `--speculative-algorithm DFLASH`."""

    DFLASH = "dflash"
    BUILTIN = "builtin"


@dataclass(frozen=True)
class Config:
    """Effective settings."""

    worker: WorkerChoice


def read_config(environ: Mapping[str, str]) -> Config:
    """Read the settings.

    Args:
        environ: usually `os.environ`.

    Raises:
        ConfigError: a variable has a value that it does not take.
    """
    value = environ.get(WORKER_VARIABLE, WorkerChoice.DFLASH.value)
    choices = {choice.value: choice for choice in WorkerChoice}
    if value not in choices:
        raise ConfigError(
            f"{WORKER_VARIABLE} is {value!r}. Set it to one of {', '.join(choices)}, or unset it."
        )
    return Config(worker=choices[value])


class WidthChoice(Enum):
    """Who chooses the verify width."""

    ADAPTIVE = "adaptive"  # measured cost and acceptance
    FIXED = "fixed"  # nobody: the widest allowed, always


class OpsChoice(Enum):
    """Which form of our device ops runs on CUDA."""

    TRITON = "triton"  # after a self-test at start
    REFERENCE = "reference"  # torch only


class Rollback(Enum):
    """How the recurrent layers of a hybrid verifier forget rejected tokens."""

    AUTO = "auto"  # replay on a CPU, snapshot on a GPU
    REPLAY = "replay"  # what each token changes is recorded, and replayed as far as accepted
    SNAPSHOT = "snapshot"  # the state after each token is kept


_WIDTH = WidthSettings()


@dataclass(frozen=True)
class Settings:
    """What the settings file may hold; the defaults are what a server without one uses.

    The meaning of the width's limits and knobs is that of `core.width.WidthSettings`.
    """

    width: str = WidthChoice.ADAPTIVE.value
    widths: tuple[int, ...] = _WIDTH.widths
    min_width: int = _WIDTH.min_width
    max_width: int | None = _WIDTH.max_width  # None: the block size
    half_life: float = _WIDTH.half_life
    hysteresis: float = _WIDTH.hysteresis
    explore_share: float = _WIDTH.explore_share
    confident_batch: int = _WIDTH.confident_batch
    draft_temperature: float = 0.3  # of sampled drafts, above 0; measured in docs/exactness.md
    draft_top_k: int = 16  # tokens a sampled draft is drawn from, 1 .. MAX_TOP_K
    ops: str = OpsChoice.TRITON.value  # on CUDA; elsewhere it is always the reference
    rollback: str = Rollback.AUTO.value  # of recurrent layers; bytes in docs/recurrent-state.md

    def width_settings(self, block_size: int) -> WidthSettings:
        """The width's part; a fixed width is a ladder of one.

        Raises:
            ConfigError: the limits contradict each other or the block size.
        """
        widest = block_size if self.max_width is None else self.max_width
        fixed = self.width == WidthChoice.FIXED.value
        chosen = WidthSettings(
            widths=self.widths,
            min_width=widest if fixed else self.min_width,
            max_width=widest,
            half_life=self.half_life,
            hysteresis=self.hysteresis,
            explore_share=self.explore_share,
            confident_batch=self.confident_batch,
        )
        chosen.ladder(block_size)
        return chosen

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in asdict(self).items())


def read_settings(path: str | None) -> Settings:
    """Read the settings file.

    Args:
        path: value of --speculative-adaptive-config; None for the defaults.

    Raises:
        ConfigError: the file cannot be read, or has an unknown key or an impossible value.
    """
    if path is None:
        return Settings()
    given = _read_object(path)
    known = [field.name for field in fields(Settings)]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ConfigError(
            f"{SETTINGS_FLAG} {path} has the unknown key {unknown[0]!r}. Known keys: "
            f"{', '.join(known)}."
        )
    for key, (wanted, fits) in _VALUES.items():
        if key in given and not fits(given[key]):
            raise ConfigError(f"{SETTINGS_FLAG} {path}: {key} is {given[key]!r}. Give {wanted}.")
    if "widths" in given:
        given["widths"] = tuple(given["widths"])
    return Settings(**given)


def _read_object(path: str) -> dict[str, Any]:
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, ValueError) as problem:
        raise ConfigError(
            f"{SETTINGS_FLAG} {path} cannot be read: {problem}. Give a file with a JSON object."
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(f"{SETTINGS_FLAG} {path} is not a JSON object. Give an object.")
    return content


def _is_int(value: object, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def _is_number(value: object, low: float, high: float) -> bool:
    """Above `low` and at most `high`."""
    return type(value) in (int, float) and low < value <= high  # type: ignore[operator]


def _is_widths(value: object) -> bool:
    return isinstance(value, list) and value != [] and all(_is_int(w, 1, 1024) for w in value)


# What each key of the settings file takes.
_VALUES: dict[str, tuple[str, Callable[[object], bool]]] = {
    "width": (
        "one of " + ", ".join(repr(choice.value) for choice in WidthChoice),
        lambda value: value in [choice.value for choice in WidthChoice],
    ),
    "ops": (
        "one of " + ", ".join(repr(choice.value) for choice in OpsChoice),
        lambda value: value in [choice.value for choice in OpsChoice],
    ),
    "rollback": (
        "one of " + ", ".join(repr(choice.value) for choice in Rollback),
        lambda value: value in [choice.value for choice in Rollback],
    ),
    "widths": ("a list of integers from 1 on", _is_widths),
    "min_width": ("an integer from 1 on", lambda value: _is_int(value, 1, 1024)),
    "max_width": (
        "an integer from 1 on, or null for the block size",
        lambda value: value is None or _is_int(value, 1, 1024),
    ),
    "half_life": ("a number of steps above 0", lambda value: _is_number(value, 0, 1e9)),
    "hysteresis": ("0 or a share", lambda value: value == 0 or _is_number(value, 0, 1)),
    "explore_share": ("a share above 0", lambda value: _is_number(value, 0, 0.5)),
    "confident_batch": ("an integer from 0 on", lambda value: _is_int(value, 0, 1024)),
    "draft_temperature": (
        "a number above 0 and at most 10",
        lambda value: _is_number(value, 0, 10),
    ),
    "draft_top_k": (
        f"an integer from 1 to {MAX_TOP_K}",
        lambda value: _is_int(value, 1, MAX_TOP_K),
    ),
}
