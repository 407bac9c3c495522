"""Seconds of a step for the width simulator: a table of estimates, interpolated."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from bench.width.traces import BLOCK_SIZE
from dflash_sglang.core.width import CostTable
from dflash_sglang.core.width.cost_model import interpolate

Bounded = Callable[[int, int], float]  # seconds by width and bound

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
# Estimated from bytes and operations (roofline), in milliseconds along BATCH_SIZES: one verify of
# Qwen3.6-35B-A3B by width, on one H200 with 4.3 TB/s, bfloat16, context 2048, experts drawn
# independently. `SNAPSHOTS` keeps the recurrent state of every verified position, as SGLang does.
SNAPSHOTS = {
    1: (1.41, 1.91, 2.85, 4.59, 7.53, 11.77, 16.55, 20.89),
    2: (1.91, 2.86, 4.61, 7.56, 11.84, 16.68, 21.15, 26.94),
    4: (2.81, 4.50, 7.35, 11.41, 15.83, 19.44, 23.50, 31.13),
    8: (4.45, 7.24, 11.20, 15.40, 18.58, 21.79, 27.69, 39.50),
    12: (5.90, 9.39, 13.62, 17.17, 19.85, 23.88, 31.88, 47.88),
    16: (7.18, 11.09, 15.18, 18.15, 20.93, 25.98, 36.07, 56.26),
}
NO_SNAPSHOTS = {
    1: SNAPSHOTS[1],
    2: (1.88, 2.80, 4.49, 7.32, 11.37, 15.73, 19.25, 23.13),
    4: (2.75, 4.38, 7.11, 10.94, 14.88, 17.54, 19.70, 23.52),
    8: (4.33, 7.00, 10.72, 14.45, 16.68, 17.98, 20.09, 24.29),
    12: (5.72, 9.03, 12.91, 15.75, 17.00, 18.18, 20.47, 25.06),
    16: (6.95, 10.62, 14.23, 16.25, 17.12, 18.37, 20.86, 25.83),
}
# A draft pass over blocks of 16; narrower ones cost as much as so many tokens of wider ones.
DRAFT = (0.47, 0.48, 0.50, 0.53, 0.64, 1.27, 2.55, 5.09)
# Fitted to the model card's tokens/s on a B200: what a step takes beyond the roofline.
HOST = 3.4


class Server(NamedTuple):
    """What steps take on one simulated server."""

    name: str
    verify: Mapping[int, tuple[float, ...]]  # milliseconds by width, along BATCH_SIZES
    host: float  # milliseconds a step takes besides, whatever its width

    def verify_seconds(self, batch_size: int, width: int) -> float:
        """A verify pass alone, linear between the rows and columns of the table."""
        widths = list(self.verify)
        column = [interpolate(BATCH_SIZES, self.verify[w], batch_size) for w in widths]
        return interpolate(widths, column, width) / 1e3

    def draft_seconds(self, batch_size: int, width: int) -> float:
        """A draft pass alone; at width 1 there is none."""
        if width == 1:
            return 0.0
        return interpolate(BATCH_SIZES, DRAFT, batch_size * width / BLOCK_SIZE) / 1e3

    def bounded_seconds(self, width: int, verified: int) -> float:
        """A verify pass of one request that routes only `verified` of its tokens to experts.

        The experts are what a verify without snapshots saves; snapshots of all tokens are written.
        """
        without = Server("", NO_SNAPSHOTS, 0.0)
        saved = without.verify_seconds(1, width) - without.verify_seconds(1, verified)
        return self.verify_seconds(1, width) - saved

    def seconds(self, batch_size: int, width: int) -> float:
        """A whole step that drafts and verifies `width` tokens of each request."""
        passes = self.verify_seconds(batch_size, width) + self.draft_seconds(batch_size, width)
        return passes + self.host / 1e3

    def measured(self, widths: Sequence[int], *, bounded: Bounded | None = None) -> CostTable:
        """What measuring at start would give a policy: the passes, without host time.

        Args:
            widths: to be measured.
            bounded: seconds of one request's verify by width and bound; None: no narrowing.
        """
        verify = {(b, w): self.verify_seconds(b, w) for b in BATCH_SIZES for w in widths}
        draft = {(b, w): self.draft_seconds(b, w) for b in BATCH_SIZES for w in widths if w > 1}
        bounds = None
        if bounded is not None:
            bounds = {
                (n, w): bounded(w, n) for w in widths if w > 1 for n in {1, *widths} if n <= w
            }
        return CostTable(draft, verify, bounded=bounds)


SERVERS = (
    Server("snapshots", SNAPSHOTS, 0.0),
    Server("no snapshots, host 3.4 ms", NO_SNAPSHOTS, HOST),
)


class Way(NamedTuple):
    """One way to narrow the verify of a single request on a simulated server."""

    name: str
    server: Server
    # The host waits so long between draft and verify for the drafter's probabilities, and verifies
    # at another width; None: the device decides, at the width that was drafted.
    wait: float | None  # seconds

    def seconds(self, width: int, verified: int) -> float:
        """A verify of `verified` of `width` tokens, without the wait."""
        if self.wait is None:
            return self.server.bounded_seconds(width, verified)
        return self.server.verify_seconds(1, verified)

    def extra_seconds(self, width: int, verified: int) -> float:
        """What a step takes beyond one that verifies all its tokens."""
        whole = self.server.verify_seconds(1, width)
        return self.seconds(width, verified) - whole + (self.wait or 0.0)

    def costs(self, widths: Sequence[int]) -> CostTable:
        """What measuring at start would give a policy; it does not know of the wait."""
        return self.server.measured(widths, bounded=self.seconds)
