"""`accept_match`: Triton against the reference."""

import pytest
import torch
from dflash_kernels.accept_match import kernel, reference
from dflash_kernels.types import Acceptance
from torch import Tensor
from torch.library import opcheck


def equal(got: Acceptance, expected: Acceptance) -> bool:
    return all(
        ours.dtype == theirs.dtype and torch.equal(ours, theirs)
        for ours, theirs in zip(got, expected, strict=True)
    )


def blocks(bs: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Drafts, targets and prefixes; two drafts in three match, so that every length occurs."""
    generator = torch.Generator().manual_seed(bs * 31 + width)
    draft_ids = torch.randint(0, 10**12, (bs, width), generator=generator)
    verifier_ids = torch.randint(0, 10**12, (bs, width), generator=generator)
    match = torch.rand(bs, width - 1, generator=generator) < 2 / 3
    match[:1] = True  # one row accepts everything
    verifier_ids[:, :-1] = torch.where(match, draft_ids[:, 1:], verifier_ids[:, :-1])
    return draft_ids, verifier_ids, torch.randint(0, 2**33, (bs,), generator=generator)


@pytest.mark.parametrize("width", [1, 2, 7, 16, 17])
@pytest.mark.parametrize("bs", [0, 1, 63])
def test_without_options(bs: int, width: int) -> None:
    given = blocks(bs, width)
    got, expected = kernel.accept_match(*given), reference.accept_match(*given)
    assert equal(got, expected)
    assert got.output_ids is given[1]
    if bs == 63:
        assert set(got.accept_len.tolist()) >= {0, width - 1}


@pytest.mark.parametrize("width", [1, 3, 16])
@pytest.mark.parametrize("options", ["limit", "extra_accept", "both"])
def test_with_options(options: str, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    given = blocks(63, width)
    # Limits below zero, zero, inside and past the block.
    limit = torch.randint(-1, width + 2, (63,), generator=generator, dtype=torch.int32)
    extra_accept = torch.rand(63, width - 1, generator=generator) < 0.5
    keywords = {}
    if options != "extra_accept":
        keywords["limit"] = limit
    if options != "limit":
        keywords["extra_accept"] = extra_accept
    got, expected = (side.accept_match(*given, **keywords) for side in (kernel, reference))
    assert equal(got, expected)


def test_rows_may_lie_apart() -> None:
    # Slices of a wider block, and int32 prefixes, as SGLang's workers keep them.
    draft_ids, verifier_ids, prefix_lens = blocks(5, 16)
    extra_accept = torch.rand(5, 15) < 0.5
    given = draft_ids[:, :6], verifier_ids[:, :6], (prefix_lens % 1000).to(torch.int32)
    assert equal(
        kernel.accept_match(*given, extra_accept=extra_accept[:, :5]),
        reference.accept_match(*given, extra_accept=extra_accept[:, :5]),
    )


@pytest.mark.parametrize("options", [False, True])
def test_as_a_custom_op(options: bool) -> None:
    # The op behind the public function: argument order, and a fake that tells the truth.
    given = blocks(5, 4)
    limit = torch.tensor([0, 1, 2, 3, 3], dtype=torch.int32) if options else None
    extra_accept = torch.rand(5, 3) < 0.5 if options else None
    op = torch.ops.dflash.accept_match.default
    opcheck(op, (*given, limit, extra_accept), test_utils=("test_schema", "test_faketensor"))
    accept_len, commit_len, bonus_ids, new_seq_lens, output_ids = op(*given, limit, extra_accept)
    expected = reference.accept_match(*given, limit=limit, extra_accept=extra_accept)
    assert torch.equal(accept_len, expected.accept_len)
    assert torch.equal(commit_len, expected.commit_len)
    assert torch.equal(bonus_ids, expected.bonus_ids)
    assert torch.equal(new_seq_lens, expected.new_seq_lens)
    assert torch.equal(output_ids, expected.output_ids if options else torch.empty(0).long())
