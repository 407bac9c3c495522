"""What the tests of the gated delta net layers share."""

import pytest
import torch


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(0)
