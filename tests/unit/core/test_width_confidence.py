"""The drafter's confidence: learned classes, and what a narrower verify is expected to commit."""

import random

import pytest

from dflash_sglang.core.width.confidence import BOUNDS, Confidence, expected_commits


def test_before_anything_was_verified_the_drafter_is_taken_at_its_word() -> None:
    rejections = Confidence(64).rejections([0.999_9, 0.97, 0.5, 0.05])
    assert rejections == sorted(rejections)
    assert rejections == pytest.approx([0.0005, 0.035, 0.5, 0.9])


def test_an_overconfident_drafter_is_believed_less() -> None:
    # It says .97 and is right half of the time; classes that were not seen keep its word.
    confidence, rng = Confidence(1000), random.Random(0)
    for _ in range(2000):
        accept_len = 0
        while accept_len < 3 and rng.random() < 0.5:
            accept_len += 1
        confidence.observe([[0.97] * 3], [accept_len])
    wrong, untouched = confidence.rejections([0.97, 0.5])
    assert wrong == pytest.approx(0.5, abs=0.05)  # 1400 of them count: 1.3 % standard error
    assert untouched == pytest.approx(0.5)


def test_drafts_behind_a_rejected_one_are_no_evidence() -> None:
    confidence = Confidence(1000)
    for _ in range(100):
        confidence.observe([[0.97, 0.3, 0.7]], [0])
    _, second, third = confidence.rejections([0.97, 0.3, 0.7])
    assert (second, third) == pytest.approx((0.7, 0.3))


def test_what_was_learned_is_forgotten_by_half_in_a_half_life() -> None:
    confidence = Confidence(10)
    for _ in range(200):
        confidence.observe([[0.97]], [0])
    for _ in range(30):
        confidence.observe([[0.97]], [1])
    (rejection,) = confidence.rejections([0.97])
    assert rejection < 0.15  # three half-lives: an eighth, less the prior's share


def test_every_confidence_has_a_class() -> None:
    confidence = Confidence(64)
    assert len(confidence.rejections([0.0, *BOUNDS, 1.0])) == len(BOUNDS) + 2


def test_expected_commits_add_what_survives() -> None:
    assert expected_commits([0.5, 0.0, 1.0], limit=16) == [0.0, 1.0, 1.5, 2.0, 2.0]
    assert expected_commits([0.0, 0.0, 0.0], limit=2) == [0.0, 1.0, 2.0, 2.0, 2.0]
