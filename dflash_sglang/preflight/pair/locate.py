"""Where the files of a model are on this machine, without asking the network."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple


class Where(StrEnum):
    """Kind of place a model was given by."""

    FOLDER = "folder"  # a local folder, complete by contract
    CACHED = "cached"  # a hub name whose snapshot is in the local cache, perhaps in part
    REMOTE = "remote"  # a hub name or URL with nothing here yet
    MISSING = "missing"  # written as a path, and nothing is there


class Located(NamedTuple):
    """A model argument resolved to what is on disk."""

    given: str
    where: Where
    folder: Path | None  # None for REMOTE and MISSING


def locate(given: str, environment: Mapping[str, str], revision: str | None = None) -> Located:
    """Resolve a model argument the way SGLang's loaders would, as far as the disk goes.

    Args:
        given: `--model-path` or `--speculative-draft-model-path`.
        environment: process environment, for the hub cache's place.
        revision: hub revision, `main` by default.
    """
    path = Path(given).expanduser()
    if path.is_dir():
        return Located(given, Where.FOLDER, path)
    if path.exists() or "://" in given:
        # A single file (GGUF) or an object store: SGLang's loaders know what to do with it.
        return Located(given, Where.REMOTE, None)
    if given.startswith(("/", ".", "~")) or given.count("/") != 1:
        return Located(given, Where.MISSING, None)
    snapshot = _cached_snapshot(given, environment, revision or "main")
    return Located(given, Where.REMOTE if snapshot is None else Where.CACHED, snapshot)


def _cached_snapshot(name: str, environment: Mapping[str, str], revision: str) -> Path | None:
    """Snapshot folder of a hub model, by the cache layout of huggingface_hub."""
    repository = _hub_cache(environment) / f"models--{name.replace('/', '--')}"
    reference = repository / "refs" / revision
    commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else revision
    snapshot = repository / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def _hub_cache(environment: Mapping[str, str]) -> Path:
    explicit = environment.get("HF_HUB_CACHE")
    if explicit:
        return Path(explicit).expanduser()
    home = environment.get("HF_HOME") or os.path.join(
        environment.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"
    )
    return Path(home).expanduser() / "hub"
