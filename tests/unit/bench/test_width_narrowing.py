"""The simulated policy that narrows a verify by the drafter's probabilities."""

import random
from collections.abc import Sequence

import pytest

from bench.width.narrowing import FIRST_READS, READ_EVERY, NarrowingPolicy
from dflash_sglang.core.width import CostTable, ObservedStep, WidthSettings

BLOCK = 16
WIDTHS = WidthSettings().ladder(BLOCK)


def verify_seconds(width: int) -> float:
    return 1.0 + 0.3 * width


def policy() -> NarrowingPolicy:
    drafts = {(1, w): 0.3 for w in WIDTHS if w > 1}
    return NarrowingPolicy(
        BLOCK, CostTable(drafts, {(1, w): verify_seconds(w) for w in WIDTHS}), WidthSettings()
    )


class Server:
    """One request whose drafter knows how good each of its drafts is."""

    def __init__(self, narrows: bool = True, seed: int = 0) -> None:
        self.policy, self.narrows, self.rng = policy(), narrows, random.Random(seed)
        self.tokens = self.seconds = 0.0
        self.verified: list[int] = []
        self.reads: list[bool] = []  # in the steps that drafted

    def run(self, steps: int, doubtful: float) -> None:
        """Serve; a draft is doubtful with that probability and then wrong half of the time."""
        for _ in range(steps):
            width = self.policy.choose(["r"])
            sure = [0.5 if self.rng.random() < doubtful else 0.9995 for _ in range(width - 1)]
            verified, reads = width, False
            if self.narrows and width > 1:
                reads = self.policy.reads_confidences(1, width)
                self.reads.append(reads)
            if reads:
                verified = self.policy.narrow(["r"], width, [sure])
            n = 0
            while n < verified - 1 and self.rng.random() < sure[n]:
                n += 1
            seconds = verify_seconds(verified) + (0.3 if width > 1 else 0.0)
            observed = ObservedStep(["r"], [n], width, seconds)
            if reads:
                self.policy.observe_narrowed(observed, verified, [sure])
            else:
                self.policy.observe(observed)
            self.tokens, self.seconds = self.tokens + n + 1, self.seconds + seconds
            self.verified.append(verified)


def narrowed(confidences: Sequence[float], policy: NarrowingPolicy | None = None) -> int:
    policy = policy or warm()
    return policy.narrow(["r"], policy.choose(["r"]), [list(confidences)])


def warm() -> NarrowingPolicy:
    server = Server()
    server.run(300, doubtful=0.0)
    assert server.policy.choose(["r"]) == BLOCK
    return server.policy


def test_sure_drafts_are_all_verified() -> None:
    assert narrowed([0.9999] * 15) == 16


@pytest.mark.parametrize(("first_doubt", "width"), [(0, 1), (1, 2), (3, 4), (8, 8), (12, 12)])
def test_a_verify_ends_where_doubt_begins(first_doubt: int, width: int) -> None:
    assert narrowed([0.9999] * first_doubt + [0.1] * (15 - first_doubt)) == width


def test_a_request_counts_with_what_it_may_commit() -> None:
    limited = warm()
    limited.limit("r", 4)
    assert limited.narrow(["r"], 16, [[0.9999] * 15]) == 4


def test_narrowing_is_faster_where_probabilities_differ() -> None:
    # Half of the doubtful drafts are wrong; a step meets its first one early or late.
    whole, narrowing = Server(narrows=False), Server()
    for server in (whole, narrowing):
        server.run(3000, doubtful=0.15)
    assert narrowing.tokens / narrowing.seconds > 1.05 * whole.tokens / whole.seconds


def test_drafts_that_were_not_verified_for_doubt_do_not_look_good() -> None:
    # Shown drafts alone would say that a draft is nearly always right.
    server = Server()
    server.run(3000, doubtful=0.15)
    assert sum(width < 16 for width in server.verified) > 1000
    right = 1 - 0.15 * 0.5
    truth = sum(right**n for n in range(BLOCK))
    acceptance = server.policy._acceptance
    expected = acceptance.expected_commit(acceptance.groups(["r"]), BLOCK)
    # About 90 steps are remembered, of an accept length that spreads as much as its mean.
    assert expected == pytest.approx(truth, rel=0.2)


def test_a_probe_is_verified_whole() -> None:
    server = Server()
    server.run(500, doubtful=1.0)
    for _ in range(2000):
        width = server.policy.choose(["r"])
        if width > 2:  # nothing but a probe drafts so much here
            assert server.policy.narrow(["r"], width, [[0.01] * (width - 1)]) == width
            return
        server.policy.observe(ObservedStep(["r"], [0], 1, verify_seconds(1)))
    raise AssertionError("no probe")


def test_probabilities_that_gain_much_are_always_read() -> None:
    server = Server()
    server.run(1000, doubtful=0.15)
    assert all(server.reads)


def test_probabilities_that_gain_nothing_are_read_once_in_a_while() -> None:
    server = Server()
    server.run(1000, doubtful=0.0)
    later = server.reads[FIRST_READS:]
    assert sum(later) == -(-len(later) // READ_EVERY)
    assert all(server.reads[:FIRST_READS])


def test_doubtful_drafts_that_come_later_are_noticed() -> None:
    """From the reads of one step in sixteen, then of all."""
    server = Server()
    server.run(1000, doubtful=0.0)
    server.run(3000, doubtful=0.15)
    assert sum(server.reads[-500:]) > 450
