"""Ways to serve that must not change an answer: the axes of bench/exactness/identity.py."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import NamedTuple

from bench.harness import checkpoints
from dflash_sglang import zoo


class Drafter(Enum):
    """Where drafts come from."""

    TRAINED = "trained"
    RANDOM = "random"  # untrained weights: next to nothing is accepted
    SLIDING = "sliding"  # the trained one with a sliding-window layer
    # Scripted in the server, see scripts.py:
    ORACLE = "oracle"  # right for exactly k drafts, for another k in every request
    ADVERSARIAL = "adversarial"  # wrong everywhere, or at random places with right ones behind


class Retraction(Enum):
    """Whether running requests lose their slots and start over."""

    NONE = "none"
    FORCED = "forced"  # every few steps
    PRESSURE = "pressure"  # the pool is too small for what was admitted


PRESSURE_TOKENS = 1024
CHUNK = 32  # tokens: less than most prompts, and a multiple of every page size tried
WINDOW = 32


class Configuration(NamedTuple):
    """One DFLASH server."""

    block_size: int
    page_size: int
    drafter: Drafter = Drafter.TRAINED
    overlap: bool = True
    radix: bool = True
    chunked: bool = False
    mixed: bool = False  # prefill chunks and decode rows in one batch
    window: bool = False  # --speculative-draft-window-size
    retraction: Retraction = Retraction.NONE
    adaptive: bool = False  # the verify width; else the whole block, always
    model: str = "moe"  # an embedded pair
    # Of recurrent layers, with a model that has some:
    rollback: str = "auto"
    strategy: str = "auto"  # --mamba-radix-cache-strategy
    interval: int = 256  # --mamba-track-interval: tokens between states for the prefix cache

    @property
    def name(self) -> str:
        """Short and unique."""
        flags = [
            "overlap" if self.overlap else "no-overlap",
            "radix" if self.radix else "no-radix",
            *(f for f in ("chunked", "mixed", "window", "adaptive") if getattr(self, f)),
        ]
        if self.retraction is not Retraction.NONE:
            flags.append(f"retract-{self.retraction.value}")
        flags += [f for f in (self.rollback, self.strategy) if f != "auto"]
        return f"{self.drafter.value} b{self.block_size} p{self.page_size} {' '.join(flags)}"

    @property
    def scripted(self) -> bool:
        """Whether the server must load scripts for its drafts."""
        return self.drafter in (Drafter.ORACLE, Drafter.ADVERSARIAL)

    def args(self) -> list[str]:
        """Flags of the server."""
        args = ["--speculative-dflash-block-size", str(self.block_size)]
        args += ["--speculative-draft-window-size", str(WINDOW)] if self.window else []
        if self.drafter is Drafter.RANDOM:
            args += ["--speculative-draft-load-format", "dummy"]
        return args + self.plain_args()

    def plain_args(self) -> list[str]:
        """Those that a server without a drafter has as well."""
        args = ["--page-size", str(self.page_size)]
        args += [] if self.overlap else ["--disable-overlap-schedule"]
        args += [] if self.radix else ["--disable-radix-cache"]
        args += ["--chunked-prefill-size", str(CHUNK)] if self.chunked else []
        args += ["--enable-mixed-chunk"] if self.mixed else []
        if self.retraction is Retraction.PRESSURE:
            # Low conservativeness: admit without setting slots aside for what will be generated.
            args += ["--max-total-tokens", str(PRESSURE_TOKENS)]
            args += ["--schedule-conservativeness", "0.05"]
        if self.strategy != "auto":
            args += ["--mamba-radix-cache-strategy", self.strategy]
        args += ["--mamba-track-interval", str(self.interval)]
        return args

    def env(self) -> dict[str, str]:
        """Variables of the server."""
        if self.retraction is not Retraction.FORCED:
            return {}
        return {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}

    def checkpoint(self, folder: Path) -> Path:
        """The drafter's checkpoint, made under `folder` where it is a variant."""
        if self.drafter is Drafter.RANDOM:
            return checkpoints.without_weights(folder / "random", model=self.model)
        if self.drafter is Drafter.SLIDING:
            return checkpoints.sliding_drafter(folder / "sliding", model=self.model)
        return zoo.path(self.model).drafter
