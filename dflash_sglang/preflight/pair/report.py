"""What a check of a pair found: typed, printable and serialisable."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from dflash_sglang.errors import PairError
from dflash_sglang.preflight.pair.head_family import HeadFamily


class Severity(StrEnum):
    """How much a finding matters."""

    ERROR = "error"  # cannot serve, or would serve with an acceptance that is silently ruined
    WARNING = "warning"  # served; something is odd enough to be logged


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a pair."""

    severity: Severity
    code: str  # stable, for scripts
    message: str  # what is wrong
    given: str  # what was found, and where
    fix: str  # what to do

    def __str__(self) -> str:
        return f"{self.message} (given: {self.given}). {self.fix}"


def error(code: str, message: str, given: object, fix: str) -> Finding:
    """A finding that refuses the pair."""
    return Finding(Severity.ERROR, code, message, str(given), fix)


def warning(code: str, message: str, given: object, fix: str) -> Finding:
    """A warning: it does not block serving."""
    return Finding(Severity.WARNING, code, message, str(given), fix)


@dataclass(frozen=True)
class PairReport:
    """Outcome of checking a drafter against a verifier."""

    verifier: str  # as given
    drafter: str  # as given
    head_family: HeadFamily | None  # None: no readable config.json
    findings: tuple[Finding, ...] = ()
    unchecked: tuple[str, ...] = field(default=())  # what could not be looked at, and why

    @property
    def errors(self) -> tuple[Finding, ...]:
        """Findings that refuse the pair."""
        return tuple(f for f in self.findings if f.severity is Severity.ERROR)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """Findings that do not block serving."""
        return tuple(f for f in self.findings if f.severity is Severity.WARNING)

    @property
    def ok(self) -> bool:
        """Whether the pair may be served."""
        return not self.errors

    def raise_if_bad(self) -> None:
        """Refuse a pair that cannot work.

        Raises:
            PairError: with every error in one line, when there is any.
        """
        if self.errors:
            raise PairError(
                f"--speculative-draft-model-path {self.drafter} cannot serve --model-path "
                f"{self.verifier}: {numbered(self.errors)}"
            )

    def as_dict(self) -> dict[str, Any]:
        """The report as plain JSON types; the schema is in docs/reference/check.md."""
        return {
            "verifier": self.verifier,
            "drafter": self.drafter,
            "layout": self.head_family.value if self.head_family is not None else None,
            "ok": self.ok,
            "findings": [asdict(finding) for finding in self.findings],
            "unchecked": list(self.unchecked),
        }


def numbered(items: Iterable[object]) -> str:
    """Join several sentences into one line; a single one stays as it is."""
    texts = [str(item) for item in items]
    if len(texts) == 1:
        return texts[0]
    return " ".join(f"[{i}] {text}" for i, text in enumerate(texts, 1))
