"""The benchmark of the host's time runs whole steps of both workers."""

from __future__ import annotations

import pytest

from bench.harness.fake_gpu.on_host import device_is_host
from bench.step.host import REQUESTS, WORKERS, Stepper, make_stepper

STEPS = 4


def launches_of(worker: str, requests: str) -> tuple[Stepper, int]:
    """A worker after some steps, and what the last of them would have launched."""
    with device_is_host() as launches:
        stepper = make_stepper(worker, 2, REQUESTS[requests])
        for _ in range(STEPS):
            launches.count = 0
            stepper.run()
        return stepper, launches.count


@pytest.mark.parametrize("requests", REQUESTS)
@pytest.mark.parametrize("worker", WORKERS)
def test_a_step_that_is_timed_reaches_every_kernel(worker: str, requests: str) -> None:
    """A harness whose steps end early would call a worker fast."""
    kernels = {
        # SGLang writes the context KV of five layers one by one.
        ("sglang", "greedy"): ["prepare", "accept", "norm and rope"] + 5 * ["write"],
        ("sglang", "filtered"): ["prepare", "top-k", "top-p", "tree", "rope"] + 5 * ["write"],
        ("ours", "greedy"): ["prepare", "accept", "context KV"],
        ("ours", "filtered"): ["prepare", "scan", "bound", "gather", "choose", "accept", "KV"],
    }
    assert launches_of(worker, requests)[1] == len(kernels[worker, requests])


def test_the_policy_learns_from_the_timed_steps() -> None:
    stepper, _ = launches_of("ours", "greedy")
    widths = stepper.worker._widths
    assert widths.forwards_by_width()["16"] == STEPS
    assert len(widths._steps) == 2  # the last, and the one whose outcome the next learns from
