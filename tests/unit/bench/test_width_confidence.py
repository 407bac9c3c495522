"""The drafter's probabilities: learned rates of rejection by class."""

import random

import pytest

from bench.width.confidence import BOUNDS, ConfidenceModel


def test_the_prior_is_a_calibrated_drafter() -> None:
    rejections = ConfidenceModel(64).rejections([0.999_9, 0.97, 0.5, 0.05])
    assert rejections == sorted(rejections)
    assert rejections == pytest.approx([0.0005, 0.035, 0.5, 0.9])


def test_an_overconfident_drafter_is_corrected() -> None:
    # Probability .97, right half of the time; classes without evidence keep the prior.
    confidence, rng = ConfidenceModel(1000), random.Random(0)
    for _ in range(2000):
        accept_len = 0
        while accept_len < 3 and rng.random() < 0.5:
            accept_len += 1
        confidence.observe([[0.97] * 3], [accept_len])
    wrong, untouched = confidence.rejections([0.97, 0.5])
    assert wrong == pytest.approx(0.5, abs=0.05)  # 1400 of them count: 1.3 % standard error
    assert untouched == pytest.approx(0.5)


def test_drafts_behind_a_rejected_one_are_no_evidence() -> None:
    confidence = ConfidenceModel(1000)
    for _ in range(100):
        confidence.observe([[0.97, 0.3, 0.7]], [0])
    _, second, third = confidence.rejections([0.97, 0.3, 0.7])
    assert (second, third) == pytest.approx((0.7, 0.3))


def test_evidence_decays_by_its_half_life() -> None:
    confidence = ConfidenceModel(10)
    for _ in range(200):
        confidence.observe([[0.97]], [0])
    for _ in range(30):
        confidence.observe([[0.97]], [1])
    (rejection,) = confidence.rejections([0.97])
    assert rejection < 0.15  # three half-lives: an eighth, less the prior's share


def test_every_probability_has_a_class() -> None:
    confidence = ConfidenceModel(64)
    assert len(confidence.rejections([0.0, *BOUNDS, 1.0])) == len(BOUNDS) + 2
