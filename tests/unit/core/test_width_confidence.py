"""The drafter's probabilities: learned rates of rejection by class."""

import random

import pytest
from dflash_kernels.verify_bound import CLASSES

from dflash_sglang.core.width.confidence_model import ConfidenceModel

# Classes of the probabilities .97, .7, .5, .3.
SURE, LIKELY, EVEN, DOUBTFUL = 6, 3, 2, 1


def test_the_prior_is_a_calibrated_drafter() -> None:
    confidence = ConfidenceModel(64)
    rejections = confidence.rejections([CLASSES - 1, SURE, EVEN, 0])
    assert rejections == pytest.approx([0.0005, 0.035, 0.5, 0.9])
    assert len(confidence.acceptance) == CLASSES
    assert confidence.acceptance == sorted(confidence.acceptance)


def test_an_overconfident_drafter_is_corrected() -> None:
    # Probability .97, right half of the time; classes without evidence keep the prior.
    confidence, rng = ConfidenceModel(1000), random.Random(0)
    for _ in range(2000):
        accept_len = 0
        while accept_len < 3 and rng.random() < 0.5:
            accept_len += 1
        confidence.observe([SURE] * 3, accept_len)
    wrong, untouched = confidence.rejections([SURE, EVEN])
    assert wrong == pytest.approx(0.5, abs=0.05)  # 1400 of them count: 1.3 % standard error
    assert untouched == pytest.approx(0.5)


def test_drafts_behind_a_rejected_one_are_no_evidence() -> None:
    confidence = ConfidenceModel(1000)
    for _ in range(100):
        confidence.observe([SURE, DOUBTFUL, LIKELY], 0)
    _, second, third = confidence.rejections([SURE, DOUBTFUL, LIKELY])
    assert (second, third) == pytest.approx((0.7, 0.3))


def test_evidence_decays_by_its_half_life() -> None:
    confidence = ConfidenceModel(10)
    for _ in range(200):
        confidence.observe([SURE], 0)
    for _ in range(30):
        confidence.observe([SURE], 1)
    (rejection,) = confidence.rejections([SURE])
    assert rejection < 0.15  # three half-lives: an eighth, less the prior's share
