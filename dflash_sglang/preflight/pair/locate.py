"""Where the files of a model are on this machine, without a look at the network."""

from __future__ import annotations

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


def locate(given: str, revision: str | None = None, hub_cache: Path | None = None) -> Located:
    """Resolve a model argument the way SGLang's loaders would, as far as the disk goes.

    Args:
        given: `--model-path` or `--speculative-draft-model-path`.
        revision: hub revision, `main` by default.
        hub_cache: where fetched models are; None for the place that huggingface_hub uses.
    """
    path = Path(given).expanduser()
    if path.is_dir():
        return Located(given, Where.FOLDER, path)
    if path.exists() or "://" in given:
        # A single file (GGUF) or an object store: SGLang's loaders know what to do with it.
        return Located(given, Where.REMOTE, None)
    if given.startswith(("/", ".", "~")) or given.count("/") != 1:
        return Located(given, Where.MISSING, None)
    # Late: it costs a sixth of a second, and most models are given as folders.
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(given, "config.json", hub_cache, revision)
    except HFValidationError:
        return Located(given, Where.MISSING, None)
    if not isinstance(config, str):
        return Located(given, Where.REMOTE, None)
    return Located(given, Where.CACHED, Path(config).parent)
