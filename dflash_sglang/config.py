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

from dflash_sglang.errors import ConfigError

# How our worker announces itself in the server's log; scripts tell it from SGLang's own by this.
READY = "DFLASH worker of dflash_sglang ready"
WORKER_VARIABLE = "DFLASH_SGLANG_WORKER"
SETTINGS_FLAG = "--speculative-adaptive-config"
MAX_TOP_K = 64


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


@dataclass(frozen=True)
class Settings:
    """What the settings file may hold; the defaults are what a server without one uses."""

    draft_temperature: float = 0.6  # of sampled drafts, above 0
    draft_top_k: int = 16  # tokens a sampled draft is drawn from, 1 .. MAX_TOP_K

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
    _check(path, given, "draft_temperature", "a number above 0 and at most 10", _is_temperature)
    _check(path, given, "draft_top_k", f"an integer from 1 to {MAX_TOP_K}", _is_top_k)
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


def _check(
    path: str, given: Mapping[str, Any], key: str, wanted: str, fits: Callable[[object], bool]
) -> None:
    if key in given and not fits(given[key]):
        raise ConfigError(f"{SETTINGS_FLAG} {path}: {key} is {given[key]!r}. Give {wanted}.")


def _is_temperature(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 10


def _is_top_k(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_TOP_K
