"""What the checks on a GPU found: printed, and kept in a file.

Not by `bench.report`: a machine with a GPU may have torch and Triton and nothing else, and a run
that is cut short must leave what it found so far.
"""

import contextlib
import importlib.metadata
import json
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Result(NamedTuple):
    """One check of one case."""

    check: str
    case: str
    passed: bool | None  # None: skipped
    note: str = ""
    numbers: Mapping[str, Any] = {}


class Results:
    """Results so far; the file is written after each: a run that is cut short leaves them."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._begin = time.perf_counter()
        self.rows: list[Result] = []

    def add(self, result: Result) -> None:
        """Print and keep one result."""
        self.rows.append(result)
        verdict = {True: "ok", False: "FAILED", None: "skipped"}[result.passed]
        numbers = "  ".join(f"{name} {value}" for name, value in result.numbers.items())
        print(f"{verdict:8}{result.check:14}{result.case:48}{numbers}{result.note}", flush=True)
        if self._file is not None:
            rows = [one._asdict() for one in self.rows]
            report = {"machine": machine(), "seconds": round(self.seconds, 1), "results": rows}
            self._file.write_text(json.dumps(report, indent=1) + "\n")

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self._begin

    @property
    def failed(self) -> bool:
        """Whether a check failed."""
        return any(result.passed is False for result in self.rows)


def machine() -> dict[str, str]:
    """Versions and device."""
    found = {name: version_of(name) for name in ("torch", "triton", "flashinfer-python")}
    found["python"] = platform.python_version()
    found["device"] = "no GPU"
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
        found["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
    return found


def version_of(package: str) -> str:
    """Its version, or "absent"."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return "absent"
