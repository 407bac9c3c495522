"""The SGLang release that this package is made for, and the one that is installed."""

from __future__ import annotations

import importlib.metadata

SGLANG_VERSION = "0.5.23"


def installed_version() -> str | None:
    """Version of the installed sglang distribution, None without one."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None
