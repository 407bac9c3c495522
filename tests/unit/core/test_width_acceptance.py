"""Acceptance model: censoring, forgetting, difficulty of a request, against simulated truths."""

import random
from collections.abc import Sequence

import pytest

from dflash_sglang.core.width import acceptance_model
from dflash_sglang.core.width.acceptance_model import AcceptanceModel, expected_commits
from dflash_sglang.core.width.difficulty import UNKNOWN, Difficulties

BLOCK = 16


def accept_len(rng: random.Random, acceptance: Sequence[float], width: int) -> int:
    for n, probability in enumerate(acceptance[: width - 1]):
        if rng.random() >= probability:
            return n
    return width - 1


def commits(acceptance: AcceptanceModel, key: str, width: int) -> float:
    return acceptance.expected_commit(acceptance.groups([key]), width)


def truth(probabilities: Sequence[float], width: int) -> float:
    total, survival = 1.0, 1.0
    for probability in probabilities[: width - 1]:
        survival *= probability
        total += survival
    return total


def fed(
    probabilities: Sequence[float], width: int, batch_size: int = 16, half_life: float = 64
) -> AcceptanceModel:
    """An estimate after many steps of requests that all accept alike."""
    rng, acceptance = random.Random(0), AcceptanceModel(BLOCK, half_life)
    keys = [str(n) for n in range(batch_size)]
    acceptance.groups(keys)
    for _ in range(1000):
        lengths = [accept_len(rng, probabilities, width) for _ in keys]
        acceptance.observe(keys, lengths, width)
    return acceptance


@pytest.mark.parametrize(
    "probabilities",
    [[0.8] * 15, [0.5] * 15, [0.05] * 15, [0.9 - 0.04 * i for i in range(15)]],
    ids=["0.8", "0.5", "0.05", "falling"],
)
def test_a_whole_block_is_learned(probabilities: list[float]) -> None:
    acceptance = fed(probabilities, BLOCK, half_life=1000)
    for width in (1, 2, 4, 8, 16):
        # About 360 steps of 16 requests count: 4 sigma of the mean commit is below 5 %.
        assert commits(acceptance, "new", width) == pytest.approx(
            truth(probabilities, width), rel=0.05
        )


def test_all_accepted_says_nothing_about_the_rest() -> None:
    # Counted as rejections of draft 4, or as acceptances of it, either would show.
    acceptance = AcceptanceModel(BLOCK, half_life=64)
    for _ in range(500):
        acceptance.observe(["a"], [3], width=4)
    assert commits(acceptance, "new", 4) == pytest.approx(4, rel=0.01)
    assert commits(acceptance, "new", 16) > 15  # as good as what was seen of it
    for _ in range(3):
        acceptance.observe(["a"], [3], width=16)  # now draft 4 is rejected
    assert commits(acceptance, "new", 16) < 6


def test_narrow_steps_estimate_what_they_show_without_bias() -> None:
    # A rejection at width 4 and a full acceptance there must not be mixed up.
    narrow = fed([0.7] * 15, width=4, half_life=1000)
    assert commits(narrow, "new", 4) == pytest.approx(truth([0.7] * 15, 4), rel=0.05)


def test_plain_steps_show_nothing() -> None:
    acceptance = fed([0.8] * 15, BLOCK)
    before = commits(acceptance, "new", 16)
    for _ in range(1000):
        acceptance.observe(["0"], [0], width=1)
    assert commits(acceptance, "new", 16) == pytest.approx(before, rel=0.1)  # remembered


@pytest.mark.parametrize("seed", range(5))
def test_many_requests_at_once_are_learned_as_one_by_one(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests come and go, have limits, and are reported after they have gone."""
    rng = random.Random(seed)
    one_by_one, at_once = AcceptanceModel(BLOCK, 64), AcceptanceModel(BLOCK, 64)
    running = [str(n) for n in range(30)]
    for step in range(200):
        keys, width = list(running), rng.choice([1, 2, 4, 8, 16])
        if rng.random() < 0.3:
            leaves, joins = rng.randrange(len(running)), f"joined in {step}"
            for model in (one_by_one, at_once):
                model.forget(running[leaves])
                if step % 2:
                    model.limit(joins, 1 + step % 5)
            running[leaves] = joins
        lengths = [accept_len(rng, [0.3 + 0.02 * n] * 15, width) for n in range(30)]
        for model, few in ((one_by_one, 30), (at_once, 0)):
            monkeypatch.setattr(acceptance_model, "FEW", few)
            model.observe(keys, lengths, width)
            model.groups(running)
        # Sums in another order differ in the last digits.
        assert at_once._curve == pytest.approx(one_by_one._curve, rel=1e-12)
        assert at_once.groups(running) == one_by_one.groups(running)


def test_a_change_is_learned_and_faster_after_plain_steps() -> None:
    def probes_until_good(plain_steps: int) -> int:
        acceptance = fed([0.1] * 15, 4, batch_size=1)
        for _ in range(plain_steps):
            acceptance.observe(["0"], [0], width=1)
        for n in range(1, 200):
            acceptance.observe(["0"], [3], width=4)
            if commits(acceptance, "new", 4) > 2.5:
                return n
        return 200

    assert probes_until_good(0) > 30  # 92 steps of evidence weigh
    assert probes_until_good(1000) <= 15


def test_a_hard_request_is_told_from_an_easy_one() -> None:
    rng, acceptance = random.Random(0), AcceptanceModel(BLOCK, half_life=64)
    keys = ["hard", "easy"]
    acceptance.groups(keys)
    for _ in range(300):
        lengths = [accept_len(rng, [p] * 15, BLOCK) for p in (0.6, 0.9)]
        acceptance.observe(keys, lengths, BLOCK)
    hard, easy = (commits(acceptance, key, 8) for key in keys)
    # 92 steps of one request and rounding of difficulties to 26 %: 20 % is 3 sigma.
    assert hard == pytest.approx(truth([0.6] * 15, 8), rel=0.2)
    assert easy == pytest.approx(truth([0.9] * 15, 8), rel=0.2)
    assert hard < commits(acceptance, "new", 8) < easy


def test_a_new_request_starts_from_what_the_server_knows() -> None:
    assert commits(fed([0.3] * 15, BLOCK), "new", 8) < 1.6
    assert commits(fed([0.95] * 15, BLOCK), "new", 8) > 6


def test_max_width_caps_what_is_expected_and_what_is_learned() -> None:
    acceptance = fed([0.95] * 15, BLOCK)
    acceptance.limit("capped", 3)
    assert commits(acceptance, "capped", 2) == commits(acceptance, "new", 2)
    assert commits(acceptance, "capped", 16) == commits(acceptance, "new", 3)
    before = commits(acceptance, "new", 16)
    for _ in range(300):
        # 2 drafts is all it may accept: nothing was rejected.
        acceptance.observe(["capped"], [2], width=16)
    assert commits(acceptance, "new", 16) >= before


def test_the_most_that_could_be_committed() -> None:
    acceptance = fed([0.5] * 15, BLOCK)
    acceptance.limit("off", 1)
    groups = acceptance.groups(["off", "new"])
    # At width 1 nothing is known: "new" could commit all 8, "off" commits 1 whatever happens.
    assert acceptance.most_commit(groups, 1, 8) == pytest.approx(9)
    known = commits(acceptance, "new", 4) + 1
    reached = commits(acceptance, "new", 4) - commits(acceptance, "new", 3)
    assert acceptance.most_commit(groups, 4, 8) == pytest.approx(known + 4 * reached)


def test_forgotten_requests_count_for_the_server_and_leave_nothing_behind() -> None:
    acceptance = AcceptanceModel(BLOCK, half_life=64)
    acceptance.groups(["a"])
    acceptance.forget("a")
    acceptance.forget("never seen")
    before = commits(acceptance, "new", 4)
    for _ in range(20):
        acceptance.observe(["a"], [0], width=4)  # late
    assert commits(acceptance, "new", 4) < before
    assert len(acceptance._difficulties) == 1


def test_a_forgotten_request_is_an_unknown_one_at_once() -> None:
    known = Difficulties(BLOCK, keep=0.99)
    known.put("a", BLOCK)
    assert known.rows(["a"]).tolist() != [UNKNOWN]
    known.forget("a")
    assert known.rows(["a"]).tolist() == [UNKNOWN]


def test_a_request_starts_average_where_another_has_left() -> None:
    acceptance = AcceptanceModel(BLOCK, half_life=64)
    for n in range(50):  # more than there is room for at first
        acceptance.limit(f"hard {n}", 2)
        for _ in range(10):
            acceptance.observe([f"hard {n}"], [0], width=2)
    for n in range(50):
        acceptance.forget(f"hard {n}")
    new = [f"new {n}" for n in range(60)]
    assert acceptance.groups(new) == {(0, BLOCK): 60}


@pytest.mark.parametrize("block_size", [1, 2])
def test_tiny_blocks(block_size: int) -> None:
    acceptance = AcceptanceModel(block_size, half_life=64)
    acceptance.observe(["a"], [block_size - 1], width=block_size)
    assert 1 <= commits(acceptance, "a", block_size) <= block_size


def test_expected_commits_add_what_survives() -> None:
    assert expected_commits([0.5, 0.0, 1.0], limit=16) == [0.0, 1.0, 1.5, 2.0, 2.0]
    assert expected_commits([0.0, 0.0, 0.0], limit=2) == [0.0, 1.0, 2.0, 2.0, 2.0]
