"""The cost table: interpolation, monotony, and learning from served steps."""

import pytest

from dflash_sglang.core.width import CostTable
from dflash_sglang.core.width.cost_model import MOST_STALE, STALE

DRAFT = {(1, 4): 1.0, (8, 4): 2.0}
VERIFY = {(1, 1): 10.0, (1, 4): 14.0, (8, 1): 24.0, (8, 4): 42.0}


@pytest.mark.parametrize(
    ("batch_size", "width", "seconds"),
    [
        (1, 1, 10.0),  # plain decoding drafts nothing
        (1, 4, 15.0),
        (8, 4, 44.0),
        (4, 1, 16.0),  # 3/7 of the way
        (15, 1, 38.0),  # the last segment goes on
        (15, 4, 73.0),
    ],
)
def test_between_and_beyond_what_was_measured(batch_size: int, width: int, seconds: float) -> None:
    assert CostTable(DRAFT, VERIFY).seconds(batch_size, width) == pytest.approx(seconds)


def test_one_batch_size_serves_all() -> None:
    costs = CostTable({}, {(4, 1): 5.0})
    assert [costs.seconds(batch, 1) for batch in (1, 4, 99)] == [5.0, 5.0, 5.0]


def test_below_the_smallest_batch_is_the_smallest() -> None:
    # Captured graphs pad a batch of 1 to the smallest captured size.
    assert CostTable({}, {(4, 1): 5.0, (8, 1): 9.0}).seconds(1, 1) == 5.0


def test_noise_in_the_measurement_cannot_make_more_work_faster() -> None:
    # Width 4 measured faster than width 1, batch 8 faster than batch 1.
    costs = CostTable(DRAFT, {(1, 1): 10.0, (1, 4): 9.0, (8, 1): 8.0, (8, 4): 20.0})
    assert costs.seconds(1, 4) == 11.0  # the draft's 1.0 on top of width 1
    assert costs.seconds(8, 1) == 10.0
    assert costs.seconds(8, 4) == 22.0


@pytest.mark.parametrize(
    ("draft", "verify"),
    [({}, {}), (DRAFT, {}), (DRAFT, {(1, 1): 1.0}), ({(1, 4): 1.0}, VERIFY), ({}, VERIFY)],
)
def test_gaps_are_refused(
    draft: dict[tuple[int, int], float], verify: dict[tuple[int, int], float]
) -> None:
    with pytest.raises(ValueError, match="measure every width"):
        CostTable(draft, verify)


def test_a_width_without_the_smallest_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="at the smallest batch size"):
        CostTable({(8, 4): 2.0}, {cell: VERIFY[cell] for cell in VERIFY if cell != (1, 4)})


def test_a_width_that_is_not_used_at_large_batches_is_not_measured_there() -> None:
    verify = VERIFY | {(1, 8): 20.0, (8, 8): 60.0, (32, 1): 30.0, (32, 8): 61.0}
    costs = CostTable(
        {(1, 4): 1.0, (8, 4): 2.0} | dict.fromkeys([(1, 8), (8, 8), (32, 8)], 3.0), verify
    )
    assert costs.seconds(8, 4) == 44.0
    assert costs.seconds(32, 8) == 64.0
    assert str(costs).count("/") == 2 + 2 + 1


def test_what_a_narrower_width_took_bounds_only_its_own_batch_sizes() -> None:
    costs = CostTable({(1, 4): 0.0}, {(1, 1): 1.0, (1, 4): 5.0, (8, 1): 9.0})
    assert costs.seconds(8, 1) == 9.0
    assert costs.seconds(8, 4) == 5.0  # what it was measured at


PER_TOKEN = {cell: 0.001 * cell[0] for cell in VERIFY}


def test_a_longer_context_adds_what_attention_reads() -> None:
    costs = CostTable(
        DRAFT,
        VERIFY,
        draft_per_token=dict.fromkeys(DRAFT, 0.0005),
        verify_per_token=PER_TOKEN,
        context=64,
    )
    assert costs.seconds(8, 4) == 44.0
    costs.at(1064)
    assert costs.seconds(1, 1) == pytest.approx(11.0)
    assert costs.seconds(8, 4) == pytest.approx(44.0 + 8.0 + 0.5)
    assert costs.seconds(4, 1) == pytest.approx(16.0 + 1 + 3 / 7 * 7)  # interpolated as well
    assert costs.draft_seconds(8, 4) + costs.verify_seconds(8, 4) == pytest.approx(52.5)
    costs.at(10)  # shorter than measured: not faster than measured
    assert costs.seconds(8, 4) == 44.0


def test_the_time_of_a_long_context_is_no_excess() -> None:
    costs = CostTable(DRAFT, VERIFY, verify_per_token=PER_TOKEN)
    costs.at(1000)
    for _ in range(50):
        costs.observe(1, 4, 16.0 + 3.0)
    costs.at(0)
    assert costs.seconds(1, 4) == pytest.approx(18.0)


def test_noise_cannot_make_a_longer_context_faster() -> None:
    costs = CostTable(DRAFT, VERIFY, verify_per_token=dict.fromkeys(VERIFY, -0.001))
    costs.at(1000)
    assert costs.seconds(8, 4) == 44.0


def test_a_table_of_other_cells_is_refused() -> None:
    with pytest.raises(ValueError, match="all at the same cells"):
        CostTable(DRAFT, VERIFY, draft_per_token=VERIFY)
    with pytest.raises(ValueError, match="all at the same cells"):
        CostTable(DRAFT, VERIFY, verify_per_token=DRAFT)


def test_what_a_width_takes_besides_counts_at_other_batch_sizes() -> None:
    costs = CostTable(DRAFT, VERIFY)
    for _ in range(50):
        costs.observe(1, 4, 15.0 + 3.0)
    assert costs.seconds(1, 4) == pytest.approx(18.0)
    assert costs.seconds(8, 4) == pytest.approx(47.0)


def test_a_width_that_was_not_served_stays_as_measured() -> None:
    # Assumed to be slow as well, it would never be tried, and width 4 never left.
    costs = CostTable(DRAFT, VERIFY)
    for _ in range(50):
        costs.observe(1, 4, 30.0)
    assert costs.seconds(1, 1) == 10.0


def test_a_batch_size_that_was_served_is_believed_over_others() -> None:
    costs = CostTable(DRAFT, VERIFY)
    for _ in range(50):
        costs.observe(1, 4, 15.0)
    for _ in range(50):
        costs.observe(8, 4, 54.0)
    # 31 steps of its own against 4 of the others, which were 10 slower.
    assert costs.seconds(1, 4) == pytest.approx(15.0, abs=1.2)
    assert costs.seconds(8, 4) == pytest.approx(54.0)


def test_faster_than_measured_is_believed_where_it_was_served_only() -> None:
    costs = CostTable(DRAFT, VERIFY)
    for _ in range(50):
        costs.observe(8, 4, 22.0)  # half of what was measured
    assert costs.seconds(8, 4) == pytest.approx(22.0, rel=0.15)
    assert costs.seconds(1, 4) == 15.0  # not negative


@pytest.mark.parametrize("every", [3, 10])
def test_outliers_are_ignored(every: int) -> None:
    # A third of the steps 20 times as long: a mean would be off by a factor of 7.
    costs = CostTable(DRAFT, VERIFY)
    for n in range(200):
        costs.observe(1, 4, 300.0 if n % every == 0 else 16.0)
    assert costs.seconds(1, 4) == pytest.approx(16.0)


def test_a_first_outlier_does_not_count_alone() -> None:
    costs = CostTable(DRAFT, VERIFY)
    costs.observe(1, 4, 1000.0)
    costs.observe(1, 4, 1000.0)
    assert costs.seconds(1, 4) == 15.0


def test_a_lasting_change_is_followed() -> None:
    costs = CostTable(DRAFT, VERIFY)
    for seconds in [15.0] * 100 + [25.0] * 16:  # a majority of the window of 31
        costs.observe(1, 4, seconds)
    assert costs.seconds(1, 4) == pytest.approx(25.0)


def test_a_width_that_was_slow_long_ago_looks_as_measured_again() -> None:
    costs = CostTable(DRAFT, VERIFY)
    for _ in range(50):
        costs.observe(1, 1, 100.0)  # something else had the machine
    for _ in range(STALE - 1):
        costs.observe(1, 4, 16.0)
    assert costs.seconds(1, 1) == 100.0
    costs.observe(1, 4, 16.0)
    assert costs.seconds(1, 1) == 10.0
    assert costs.seconds(8, 1) == 24.0
    assert costs.seconds(1, 4) == 16.0


def test_a_width_that_stays_slow_is_tried_ever_less() -> None:
    costs = CostTable(DRAFT, VERIFY)
    waits = []
    for _ in range(9):
        for _ in range(3):
            costs.observe(1, 1, 100.0)  # tried, and slow again
        steps = 0
        while costs.seconds(1, 1) == 100.0:
            costs.observe(1, 4, 16.0)
            steps += 1
        waits.append(steps)
    assert waits == [min(STALE * 2**n, MOST_STALE) for n in range(9)]
