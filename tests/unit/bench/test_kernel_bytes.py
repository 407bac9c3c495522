"""Bytes that a verify's sampling and accepting moves: the counter, and bounds of its counts."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.kernels.byte_counter import PASSES, ByteCounter, physical_bytes
from bench.kernels.launches import VOCABULARY, WIDTH
from bench.kernels.traffic import FILTERED, FILTERS, count_ordinary, count_ours, count_sglang

pytestmark = pytest.mark.slow  # imports SGLang's sampler

FLOOR = WIDTH * VOCABULARY * 2


def test_the_counter_counts_what_ops_read_and_write() -> None:
    with FakeTensorMode(), ByteCounter({"_softmax": 3}) as counter:
        x = torch.zeros(10, 100)  # written: 4000
        after_zeros = counter.bytes
        x[:5].view(-1)  # a view: nothing
        x.softmax(dim=1)  # read three times, written
        after_softmax = counter.bytes
        x.gather(1, torch.zeros(10, 1, dtype=torch.int64))  # 80 written; 80, 40 read; 40 written
        after_gather = counter.bytes
    assert after_zeros == 4000
    assert after_softmax - after_zeros == 4 * 4000
    assert after_gather - after_softmax == 80 + 80 + 40 + 40


def test_a_repeated_row_is_counted_once() -> None:
    assert physical_bytes(torch.zeros(1, 8).expand(100, 8)) == 32


def test_ours_is_one_read_of_the_logits() -> None:
    # 1 %: what tiles leave for the second launch.
    for filters in ("greedy", "none"):
        assert FLOOR < count_ours(1, filters) < 1.01 * FLOOR


def test_sglangs_greedy_path_copies_to_float32_and_reads_the_copy() -> None:
    # 2 bytes read, 4 written, 4 read: five floors, and a few ids.
    assert abs(count_sglang(1, "greedy", {}) / FLOOR - 5) < 0.01


def test_sglangs_sampled_path_makes_the_matrices_it_makes() -> None:
    # In floors of 2 bytes: copy 3, scaled 4, softmax 4, zeros 2, one row in 16 of two matrices.
    assert abs(count_sglang(1, "none", {}) / FLOOR - (13 + 4 / 16)) < 0.01


@pytest.mark.parametrize("filters", FILTERED)
def test_ours_with_filters_is_at_most_two_reads_and_what_is_gathered(filters: str) -> None:
    # 10 %: maxima and sums of 128 columns, and up to 16 bytes for each of 4,096 gathered tokens.
    assert 2 * FLOOR < count_ours(1, filters) < 2.21 * FLOOR


@pytest.mark.parametrize("filters", FILTERS)
def test_ours_moves_less_than_sglangs_workers_even_with_single_reads(filters: str) -> None:
    ours = count_ours(8, filters)
    assert ours < count_sglang(8, filters, {}) < count_sglang(8, filters, PASSES) + 1
    if filters in FILTERED:
        assert ours < count_ordinary(8, filters, {})
