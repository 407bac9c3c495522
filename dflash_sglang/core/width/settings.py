"""Knobs of the verify width."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_sglang.errors import ConfigError


@dataclass(frozen=True)
class WidthSettings:
    """What an operator may set; `min_width == max_width` is a fixed width.

    Attributes:
        widths: widths on offer, the anchor counted. Each needs an attention backend and captured
            graphs of its own, so the list is short. 1 is plain decoding, without a draft.
        min_width: no step is narrower. Above 1 there is no falling back to plain decoding.
        max_width: no step is wider; None is the block size.
        half_life: steps after which an observed acceptance of one request weighs half; of a batch
            of n, steps / sqrt(n). Shorter follows a change sooner; longer resolves smaller
            differences between widths at batch size 1.
        hysteresis: share by which another width must promise more tokens per second before it
            replaces the current one, so that noise does not make the width flap.
        explore_share: share of the time that steps wider than the best known width may lose.
    """

    widths: tuple[int, ...] = (1, 4, 8, 16)  # docs/results/width.md: which pay
    min_width: int = 1
    max_width: int | None = None
    half_life: float = 64.0
    hysteresis: float = 0.02
    explore_share: float = 0.01

    def ladder(self, block_size: int) -> tuple[int, ...]:
        """Widths a drafter with this block size uses, ascending; the widest allowed is among them.

        Raises:
            ConfigError: the settings contradict each other or the block size.
        """
        widest = block_size if self.max_width is None else self.max_width
        if not 1 <= self.min_width <= widest <= block_size:
            raise ConfigError(
                f"min_width is {self.min_width}, max_width {self.max_width}, block size "
                f"{block_size}. Choose 1 <= min_width <= max_width <= block size."
            )
        if self.half_life <= 0:
            raise ConfigError(f"half_life is {self.half_life}. Choose a number of steps above 0.")
        if self.hysteresis < 0:
            raise ConfigError(f"hysteresis is {self.hysteresis}. Choose 0 or a small share.")
        if not 0 < self.explore_share < 1:
            raise ConfigError(
                f"explore_share is {self.explore_share}. Choose a share between 0 and 1, not 0: "
                "a server that stopped drafting would never find out that drafts are good again."
            )
        return tuple(sorted({w for w in self.widths if self.min_width <= w <= widest} | {widest}))
