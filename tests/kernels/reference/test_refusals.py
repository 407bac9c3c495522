"""Arguments that do not fit each other are refused by name, before anything runs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dflash_kernels.accept_filtered import accept_filtered
from dflash_kernels.accept_filtered import cases as filtered_cases
from dflash_kernels.accept_match import accept_match
from dflash_kernels.accept_match import cases as match_cases
from dflash_kernels.accept_sampled import accept_sampled
from dflash_kernels.accept_sampled import cases as sampled_cases
from dflash_kernels.block_verify import block_verify, token_wise
from dflash_kernels.block_verify import cases as verify_cases
from dflash_kernels.case import Inputs
from dflash_kernels.prepare_block import cases as block_cases
from dflash_kernels.prepare_block import prepare_block
from torch import Tensor

INPUTS = Inputs("cpu", 1)


def shorter(arguments: tuple[Any, ...], index: int) -> list[Any]:
    """The arguments, one of them without its last row."""
    changed = list(arguments)
    changed[index] = changed[index][:-1]
    return changed


@pytest.mark.parametrize(("index", "name"), [(1, "prefix_lens"), (2, "req_pool_indices")])
def test_prepare_block(index: int, name: str) -> None:
    given = block_cases.layout(INPUTS, 3, 4)
    with pytest.raises(ValueError, match=rf"expected {name} of shape \(3,\), got \(2,\)"):
        prepare_block(*shorter(given, index), block_size=4, mask_token_id=1)


@pytest.mark.parametrize("block_size", [0, 201])
def test_a_block_that_the_table_cannot_hold(block_size: int) -> None:
    given = block_cases.layout(INPUTS, 3, 4)
    with pytest.raises(ValueError, match=rf"at least block_size={block_size} >= 1 adjacent"):
        prepare_block(*given, block_size=block_size, mask_token_id=1)


def test_a_table_whose_columns_lie_apart() -> None:
    anchors, prefixes, rows, table = block_cases.layout(INPUTS, 3, 4)
    apart = table.T.contiguous().T
    with pytest.raises(ValueError, match="adjacent columns"):
        prepare_block(anchors, prefixes, rows, apart, block_size=4, mask_token_id=1)


@pytest.mark.parametrize(("index", "name"), [(1, "verifier_ids"), (2, "prefix_lens")])
def test_accept_match(index: int, name: str) -> None:
    with pytest.raises(ValueError, match=f"expected {name} of shape"):
        accept_match(*shorter(match_cases.blocks(INPUTS, 3, 4), index))


@pytest.mark.parametrize(
    ("name", "shape"), [("limit", (2,)), ("limit", (3, 1)), ("extra_accept", (3, 4))]
)
def test_options_of_accept_match(name: str, shape: tuple[int, ...]) -> None:
    given = match_cases.blocks(INPUTS, 3, 4)
    with pytest.raises(ValueError, match=f"expected {name} of shape"):
        accept_match(*given, **{name: torch.zeros(shape, dtype=torch.int32)})


SAMPLERS = [
    (accept_sampled, sampled_cases.requests(INPUTS, 3, 2, 9)),
    (accept_filtered, filtered_cases.requests(INPUTS, 3, 2, 9)),
]
NAMES = ["accept_sampled", "accept_filtered"]


@pytest.mark.parametrize(("op", "given"), SAMPLERS, ids=NAMES)
@pytest.mark.parametrize(
    ("index", "name"),
    [(0, "logits"), (2, "prefix_lens"), (3, "temperatures"), (4, "seeds")],
)
def test_samplers(op: Callable[..., Any], given: tuple[Any, ...], index: int, name: str) -> None:
    with pytest.raises(ValueError, match=f"expected {name} of shape"):
        op(*shorter(given, index))


@pytest.mark.parametrize(("op", "given"), SAMPLERS, ids=NAMES)
@pytest.mark.parametrize(("name", "dtype"), [("seeds", torch.int32), ("logits", torch.int64)])
def test_dtypes(op: Callable[..., Any], given: Any, name: str, dtype: torch.dtype) -> None:
    other = getattr(given, name).to(dtype)
    with pytest.raises(TypeError, match=f"expected {name} of dtype .*, got {dtype}"):
        op(*given._replace(**{name: other}))


def test_filters() -> None:
    given = filtered_cases.requests(INPUTS, 3, 2, 9)
    shorter_ps = given.filters._replace(top_ps=given.filters.top_ps[:2])
    with pytest.raises(ValueError, match="expected top_ps of shape"):
        accept_filtered(*given._replace(filters=shorter_ps))


@pytest.mark.parametrize("rule", [block_verify, token_wise])
@pytest.mark.parametrize(
    ("index", "name"), [(2, "verifier_probs"), (3, "uniforms"), (4, "prefix_lens")]
)
def test_block_verify(rule: Callable[..., Any], index: int, name: str) -> None:
    given = verify_cases.requests(INPUTS, 3, 4, 20, 2)
    with pytest.raises(ValueError, match=f"expected {name} of shape"):
        rule(*shorter(given, index))


def test_a_proposal_of_another_width() -> None:
    given = verify_cases.requests(INPUTS, 3, 4, 20, 2)
    cut: list[Tensor] = [columns[:, :2] for columns in given.proposal]
    with pytest.raises(ValueError, match="expected top_ids of shape"):
        block_verify(*given._replace(proposal=type(given.proposal)(*cut)))
