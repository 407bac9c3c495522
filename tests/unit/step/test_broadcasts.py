"""Between ranks the host agrees once a step, at most; acceptance is agreed on by the devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bench.harness.fake_gpu.on_host import device_is_host
from bench.step.host import Stepper, make_stepper
from dflash_sglang.core.width import WidthPolicy
from dflash_sglang.step.multi_step import MultiStep

STEPS = 6


class Group:
    """Two ranks, of which the other one sends what this one would."""

    world_size, ranks, cpu_group = 2, (0, 1), "of hosts"

    def __init__(self) -> None:
        self.sent: list[Tensor] = []

    def broadcast(self, tensor: Tensor, src: int, group: Any) -> None:
        """In place of `torch.distributed.broadcast`."""
        assert (src, group) == (0, "of hosts")
        self.sent.append(tensor.clone())


def broadcasts(
    monkeypatch: pytest.MonkeyPatch, width: int, batch: int, *, overlap: bool
) -> list[int]:
    """Of the hosts, in each of some steps at one width."""
    group = Group()
    monkeypatch.setattr(torch.distributed, "broadcast", group.broadcast)
    monkeypatch.setattr(WidthPolicy, "choose", lambda self, keys: width)
    with device_is_host(disable_overlap_schedule=not overlap):
        stepper = make_stepper("ours", batch, {})
        stepper.worker._widths._tp_group = group
        return [_broadcasts_of_a_step(stepper, group) for _ in range(STEPS)]


def _broadcasts_of_a_step(stepper: Stepper, group: Group) -> int:
    group.sent.clear()
    batch = stepper.batch
    lens, on_host = batch.seq_lens, batch.seq_lens_cpu
    stepper.run()
    batch.seq_lens, batch.seq_lens_cpu = lens, on_host  # as the scheduler restores them
    return len(group.sent)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("width", [16, 4, 1])
def test_ranks_agree_once_a_step(
    monkeypatch: pytest.MonkeyPatch, width: int, batch: int, overlap: bool
) -> None:
    """Each time costs 50 us or more in which the host launches nothing."""
    assert broadcasts(monkeypatch, width, batch, overlap=overlap) == [1] * STEPS


def test_a_second_broadcast_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def extend(self: MultiStep, batch: Any, first: Any, *_: Any) -> Any:
        hosts: Any = Group.cpu_group
        torch.distributed.broadcast(torch.zeros(1), src=0, group=hosts)
        return first

    monkeypatch.setattr(MultiStep, "extend", extend)
    assert broadcasts(monkeypatch, 1, 1, overlap=True) == [2] * STEPS


def test_one_rank_broadcasts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "world_size", 1)
    assert broadcasts(monkeypatch, 1, 1, overlap=False) == [0] * STEPS
