"""What the environment of a checkout must hold, where it is kept and what is found there."""

import enum
import hashlib
import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

MARKER = "dflash_sglang.json"  # in every environment made here, from its first moment


class State(enum.Enum):
    """What is found at the place of the environment."""

    ABSENT = "absent"
    READY = "ready"
    HALF_MADE = "half-made"  # ours, interrupted or its Python gone
    OUTDATED = "outdated"  # ours, with other pins
    FOREIGN = "foreign"  # not made here


class Pins(NamedTuple):
    """What the environment must hold."""

    requirements: tuple[str, ...]  # of the project and its `dev` extra
    constraints: Path
    key: str  # changes with any pin


def read_pins(root: Path) -> Pins:
    """Reads the requirements of pyproject.toml and the hash over them and constraints.txt."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    requirements = tuple(project["dependencies"] + project["optional-dependencies"]["dev"])
    constraints = root / "constraints.txt"
    digest = hashlib.sha256("\n".join(sorted(requirements)).encode())
    digest.update(constraints.read_bytes())
    return Pins(requirements, constraints, digest.hexdigest()[:12])


def location(pins: Pins, environ: Mapping[str, str]) -> Path:
    """Where the environment is kept: DFLASH_SGLANG_VENV, or the user's cache folder."""
    if chosen := environ.get("DFLASH_SGLANG_VENV"):
        return Path(chosen).expanduser().absolute()
    cache = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache).absolute() / "dflash_sglang" / pins.key


def find_state(path: Path, key: str) -> State:
    """Looks at the marker of the environment at `path`; changes nothing."""
    marker = path / MARKER
    if not marker.exists():
        is_empty = not path.exists() or (path.is_dir() and not any(path.iterdir()))
        return State.ABSENT if is_empty else State.FOREIGN
    record = json.loads(marker.read_text())
    # exists() follows the link: it is false once the Python it was made with was uninstalled.
    if not record["complete"] or not (path / "bin" / "python").exists():
        return State.HALF_MADE
    return State.READY if record["key"] == key else State.OUTDATED


def write_marker(path: Path, key: str, *, complete: bool) -> None:
    """Replaces the marker in one step, so that it is never read half-written."""
    write_whole(path / MARKER, json.dumps({"key": key, "complete": complete}))


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that readers see all of it or the old one."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(text)
    unfinished.replace(path)
