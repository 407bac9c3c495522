"""The embedded pairs: small verifiers that ship with their DFlash drafters and held-out prompts.

    pair = zoo.path("moe")           # or "hybrid"; pair.verifier, pair.drafter: checkpoint folders
    prompts = zoo.prompts("moe")     # {"code": (Prompt, ...), "json": ...}

They let the tests and the demo run without a download. How a pair was trained and how well its
drafter does is in its ``CARD.md``.
"""

import json
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).resolve().parent


class Pair(NamedTuple):
    """Checkpoint folders of one embedded pair."""

    verifier: Path
    drafter: Path


class Prompt(NamedTuple):
    """One held-out exchange: neither the question nor the answer occurs in the training data."""

    family: str  # kind of task: code, json, sql, ... (the keys of prompts.json)
    question: str  # content of the user's chat message
    answer: str  # the reference answer

    @property
    def text(self) -> str:
        """The question in the pair's chat format, ready for a completion endpoint."""
        return f"<|im_start|>user\n{self.question}<|im_end|>\n<|im_start|>assistant\n"


def names() -> tuple[str, ...]:
    """Names of the embedded pairs."""
    return tuple(sorted(folder.parent.name for folder in _ROOT.glob("*/verifier")))


def path(name: str = "moe") -> Pair:
    """Checkpoint folders of an embedded pair.

    Args:
        name: one of ``names()``.

    Raises:
        KeyError: no such pair is embedded.
    """
    if name not in names():
        raise KeyError(f"no embedded pair {name!r}; available: {', '.join(names())}")
    return Pair(verifier=_ROOT / name / "verifier", drafter=_ROOT / name / "drafter")


def prompts(name: str = "moe") -> dict[str, tuple[Prompt, ...]]:
    """Held-out prompts of an embedded pair, by family.

    Args:
        name: one of ``names()``.

    Raises:
        KeyError: no such pair is embedded.
    """
    file = path(name).verifier.parent / "prompts.json"
    families = json.loads(file.read_text(encoding="utf-8"))
    return {
        family: tuple(Prompt(family, entry["question"], entry["answer"]) for entry in entries)
        for family, entries in families.items()
    }
