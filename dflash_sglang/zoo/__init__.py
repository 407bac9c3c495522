"""The model pairs that ship with the package: a verifier, its DFlash drafter and held-out prompts.

pair = zoo.path("moe")           # or "hybrid"; pair.verifier, pair.drafter: checkpoint folders
prompts = zoo.prompts("moe")     # {"code": (Prompt, ...), "json": ...}
"""

import json
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).resolve().parent


class Pair(NamedTuple):
    """Folders of one embedded pair."""

    verifier: Path
    drafter: Path


class Prompt(NamedTuple):
    """One held-out exchange: neither the question nor the answer occurs in the training data."""

    family: str
    question: str  # what the user asks; the content of a chat message
    answer: str  # the reference answer

    @property
    def text(self) -> str:
        """The question in the pair's chat format, ready for a completion endpoint."""
        return f"<|im_start|>user\n{self.question}<|im_end|>\n<|im_start|>assistant\n"


def names() -> tuple[str, ...]:
    """Names of the embedded pairs."""
    return tuple(sorted(folder.parent.name for folder in _ROOT.glob("*/verifier")))


def path(name: str = "moe") -> Pair:
    """Checkpoint folders of the pair called `name`.

    Raises:
        KeyError: no such pair is embedded.
    """
    if name not in names():
        raise KeyError(f"no embedded pair {name!r}; there is {', '.join(names())}")
    return Pair(verifier=_ROOT / name / "verifier", drafter=_ROOT / name / "drafter")


def prompts(name: str = "moe") -> dict[str, tuple[Prompt, ...]]:
    """Held-out prompts of the pair called `name`, by family; errors as `path`."""
    file = path(name).verifier.parent / "prompts.json"
    families = json.loads(file.read_text(encoding="utf-8"))
    return {
        family: tuple(Prompt(family, entry["question"], entry["answer"]) for entry in entries)
        for family, entries in families.items()
    }
