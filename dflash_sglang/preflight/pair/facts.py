"""One side of a pair as it lies on disk: configuration and headers, or why they are not there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_sglang.drafter.checkpoint import CheckpointError, TensorInfo
from dflash_sglang.json_values import read_object
from dflash_sglang.preflight.pair.locate import Located, Where
from dflash_sglang.preflight.pair.report import Finding, error
from dflash_sglang.preflight.pair.verifier import weight_headers

_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf", "consolidated*.safetensors")


@dataclass
class Side:
    """What could be read of a verifier or a drafter."""

    place: Located
    role: str  # "verifier" or "drafter"
    flag: str  # the server flag that names it
    config: dict[str, Any] | None = None
    tensors: dict[str, TensorInfo] | None = None
    findings: list[Finding] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    def refuse(self, code: str, message: str, fix: str) -> None:
        """Add an error about this side's files."""
        given = f"{self.flag} {self.place.given}"
        self.findings.append(error(f"{self.role}_{code}", message, given, fix))


def read_side(
    place: Located, role: str, flag: str, overrides: Mapping[str, Any], with_weights: bool
) -> Side:
    """Read configuration and headers.

    Args:
        place: where the model is.
        role: "verifier" or "drafter", for the sentences.
        flag: the server flag that named it.
        overrides: laid over the configuration.
        with_weights: whether to read the headers.

    Returns:
        The side; problems are among its findings, absences among its unchecked.
    """
    side = Side(place, role, flag)
    if place.where is Where.MISSING:
        side.refuse(
            "missing",
            f"the folder of the {role} does not exist",
            "Correct the path, or give a hub name (owner/name).",
        )
    elif place.folder is None:
        side.unchecked.append(f"{role} {place.given}: not a folder on this machine")
    else:
        _read_config(side, overrides)
        if with_weights and side.config is not None:
            _read_headers(side)
    return side


def _read_config(side: Side, overrides: Mapping[str, Any]) -> None:
    assert side.place.folder is not None
    try:
        side.config = read_object(side.place.folder / "config.json", CheckpointError)
        side.config.update(overrides)
    except CheckpointError as problem:
        side.refuse(
            "unreadable",
            f"the {side.role} has no readable config.json: {problem}",
            "Give a complete model folder; fetch it again if a download was cut off.",
        )


def _read_headers(side: Side) -> None:
    folder, where = side.place.folder, side.place.where
    assert folder is not None
    try:
        side.tensors = weight_headers(folder)
    except (CheckpointError, OSError) as problem:
        if where is Where.CACHED:  # SGLang fetches what is missing
            side.unchecked.append(f"weights of the {side.role}: {problem}")
        else:
            side.refuse(
                "weights",
                f"the weights of the {side.role} cannot be read: {problem}",
                "Fetch the checkpoint again.",
            )
        return
    if side.tensors is not None:
        return
    if where is Where.FOLDER and not any(any(folder.glob(kind)) for kind in _OTHER_WEIGHTS):
        side.refuse(
            "weights",
            f"the folder of the {side.role} has no weight files",
            "Give a complete model folder.",
        )
    else:
        side.unchecked.append(f"weights of the {side.role}: no safetensors headers to read")
