"""Settings of this package that no SGLang flag covers, read once from the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from dflash_sglang.errors import ConfigError

# How our worker announces itself in the server's log; scripts tell it from SGLang's own by this.
READY = "DFLASH worker of dflash_sglang ready"
WORKER_VARIABLE = "DFLASH_SGLANG_WORKER"


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
