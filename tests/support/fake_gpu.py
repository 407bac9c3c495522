"""A torch that finds a GPU, unless it is hidden."""

from __future__ import annotations

import os

import pytest
import torch

from launch.devices import HIDDEN


def fake_gpu(monkeypatch: pytest.MonkeyPatch, *, cannot_be_hidden: bool = False) -> None:
    """CUDA is there as long as CUDA_VISIBLE_DEVICES is not empty, as with a driver."""
    for name in HIDDEN:
        # Set first, so that what the code under test sets is undone as well.
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)

    def is_available() -> bool:
        return cannot_be_hidden or os.environ.get("CUDA_VISIBLE_DEVICES") != ""

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
