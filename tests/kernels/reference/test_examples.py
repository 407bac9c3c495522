"""The examples in the docstrings of the public ops."""

import doctest
import importlib

import pytest
import torch
from dflash_kernels.case import OPS

WITH_EXAMPLES = {"prepare_block", "accept_match", "draft_tail", "verify_bound"}


@pytest.mark.parametrize("op", OPS)
def test_examples(op: str) -> None:
    module = importlib.import_module(f"dflash_kernels.{op}")
    failed, tried = doctest.testmod(module, extraglobs={"torch": torch})
    assert failed == 0
    assert (tried > 0) == (op in WITH_EXAMPLES)
