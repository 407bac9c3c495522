"""The bound on what a width can gain: measured step times, and the best widths in hindsight."""

from itertools import product

import pytest

from bench.report import DATA
from bench.width.bound import Profile, hindsight, load_profile
from bench.width.traces import Workload, geometric, trace

WIDTHS = (1, 4, 16)
COSTS = Profile(
    batch_sizes=(1, 8),
    draft={4: (1.0, 2.0), 16: (2.0, 6.0)},
    verify={1: (2.0, 4.0), 4: (3.0, 6.0), 16: (5.0, 12.0)},
    other={1: (0.3, 0.5), 4: (1.0, 1.5), 16: (1.2, 2.0)},
)


def test_a_step_costs_what_was_measured() -> None:
    assert COSTS.seconds(1, 1) == pytest.approx(2.3e-3)
    assert COSTS.seconds(8, 16) == pytest.approx(20e-3)
    assert COSTS.seconds(8, 10) == pytest.approx((4 + 9 + 1.75) * 1e-3)


def test_the_profile_on_record_is_reproduced() -> None:
    costs = load_profile(DATA / "step_profile.json")
    # A step of the file is the sum of its parts; passes alone are what a server measures first.
    for batch_size, width in ((1, 1), (8, 8), (32, 16)):
        passes = costs.measured((1, 8, 16)).measured(batch_size, width)
        assert 0.6 * costs.seconds(batch_size, width) < passes < costs.seconds(batch_size, width)


@pytest.mark.parametrize("batch_size", [1, 8])
def test_hindsight_is_the_best_of_all_choices(batch_size: int) -> None:
    mixed = Workload("mixed", ((geometric(0.5), geometric(0.95)),))
    steps = list(trace(mixed, batch_size, 6, seed=1))

    def speed(widths: tuple[int, ...]) -> float:
        tokens = sum(
            min(n + 1, width)
            for step, width in zip(steps, widths, strict=True)
            for n in step.accept_lens
        )
        return tokens / sum(COSTS.seconds(batch_size, width) for width in widths)

    best = max(speed(widths) for widths in product(WIDTHS, repeat=len(steps)))
    assert hindsight(steps, COSTS, WIDTHS) == pytest.approx(best, rel=1e-12)
