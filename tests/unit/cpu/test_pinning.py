"""Code that pins memory runs on a machine that cannot, within a call and not beyond."""

from __future__ import annotations

import pytest
import torch

from dflash_sglang.cpu.pinning import without_pinning


def test_pinning_does_nothing_within_the_call() -> None:
    mask = torch.tensor([True, False])
    seen = []
    without_pinning(lambda batch: seen.append((batch, mask.pin_memory())), "batch")
    assert seen[0][0] == "batch"
    assert seen[0][1] is mask
    with pytest.raises(RuntimeError):  # elsewhere it is torch's own
        mask.pin_memory()


def test_tensors_made_pinned_are_made_as_any_other() -> None:
    def make() -> tuple[torch.Tensor, ...]:
        return (
            torch.tensor([1.5], pin_memory=True),
            torch.zeros(2, dtype=torch.int32, pin_memory=True),
            torch.empty((3,), dtype=torch.int32, device="cpu", pin_memory=True),
        )

    made = without_pinning(make)
    assert [tensor.dtype for tensor in made] == [torch.float32, torch.int32, torch.int32]
    assert made[0].tolist() == [1.5]
    with pytest.raises(RuntimeError):
        make()
