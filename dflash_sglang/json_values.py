"""Reading JSON that somebody else wrote: objects from files, and integers among their values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash_sglang.errors import DFlashError


def read_object(file: Path, error: type[DFlashError]) -> dict[str, Any]:
    """Read a file that holds a JSON object.

    Args:
        file: the file.
        error: raised when it does not exist, cannot be read, is not JSON or is not an object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise error(f"{file} does not exist") from None
    except (OSError, ValueError) as problem:
        raise error(f"{file} cannot be read as JSON: {problem}") from problem
    if not isinstance(content, dict):
        raise error(f"{file} is not a JSON object, but a {type(content).__name__}")
    return content


def as_int(value: object) -> int | None:
    """`value` where it is an integer and not a truth value."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None
