"""The accept rule against a plain loop, and the distribution it must keep."""

from collections import Counter
from itertools import product

import pytest
import torch
from dflash_kernels.accept_match import accept_match


def accept_by_loop(draft: list[int], target: list[int]) -> int:
    accepted = 0
    while accepted < len(draft) - 1 and draft[accepted + 1] == target[accepted]:
        accepted += 1
    return accepted


@pytest.mark.parametrize("width", [1, 2, 4])
def test_every_block_over_two_tokens(width: int) -> None:
    # Exhaustive: every draft against every target, so each accept length 0..width-1 occurs.
    blocks = list(product(range(2), repeat=width))
    pairs = [(draft, target) for draft in blocks for target in blocks]
    draft_ids = torch.tensor([draft for draft, _ in pairs])
    verifier_ids = torch.tensor([target for _, target in pairs])
    prefix_lens = torch.arange(len(pairs)) * 3

    got = accept_match(draft_ids, verifier_ids, prefix_lens)

    seen = set()
    for i, (draft, target) in enumerate(pairs):
        accepted = accept_by_loop(list(draft), list(target))
        seen.add(accepted)
        assert got.accept_len[i] == accepted
        assert got.commit_len[i] == accepted + 1
        assert got.bonus_ids[i] == target[accepted]
        committed = [*draft[1 : accepted + 1], target[accepted]]
        assert got.output_ids[i, : accepted + 1].tolist() == committed
        assert got.new_seq_lens[i] == prefix_lens[i] + accepted + 1
    assert seen == set(range(width))
    assert got.accept_len.dtype == got.commit_len.dtype == torch.int32


def test_a_match_after_a_mismatch_does_not_count() -> None:
    got = accept_match(
        torch.tensor([[9, 1, 2, 3]]), torch.tensor([[1, 8, 3, 4]]), torch.tensor([10])
    )
    assert got.accept_len.tolist() == [1]
    assert got.bonus_ids.tolist() == [8]


@pytest.mark.parametrize("width", [1, 2, 3])
def test_every_limit_and_exception_over_two_tokens(width: int) -> None:
    """Against a loop: stop at the limit, or where neither y nor `extra_accept` agrees."""
    blocks = list(product(range(2), repeat=width))
    allowed = list(product((False, True), repeat=width - 1))
    cases = list(product(blocks, blocks, allowed, range(-1, width + 1)))
    draft_ids, verifier_ids, extra_accept, limit = zip(*cases, strict=True)

    got = accept_match(
        torch.tensor(draft_ids),
        torch.tensor(verifier_ids),
        torch.zeros(len(cases), dtype=torch.int64),
        limit=torch.tensor(limit, dtype=torch.int32),
        extra_accept=torch.tensor(extra_accept, dtype=torch.bool).view(len(cases), width - 1),
    )

    for i, (draft, target, exceptions, most) in enumerate(cases):
        accepted = 0
        while accepted < min(most, width - 1) and (
            draft[accepted + 1] == target[accepted] or exceptions[accepted]
        ):
            accepted += 1
        assert got.accept_len[i] == accepted
        assert got.commit_len[i] == accepted + 1
        assert got.bonus_ids[i] == target[accepted]
        assert got.output_ids[i].tolist() == [*draft[1 : accepted + 1], *target[accepted:]]


def test_without_exceptions_nothing_is_copied() -> None:
    verifier_ids = torch.tensor([[1, 2]])
    limit = torch.tensor([1], dtype=torch.int32)
    got = accept_match(torch.tensor([[0, 1]]), verifier_ids, torch.tensor([5]), limit=limit)
    assert got.output_ids is verifier_ids


def test_sampled_targets_keep_the_verifiers_distribution() -> None:
    """Sequences of three tokens drawn through draft and verify follow the verifier's own law.

    The draft is the verifier's most likely continuation, so it is often accepted: a rule that
    favoured drafts would show up in the law. Chi-square with 26 degrees of freedom: its 0.9999
    quantile is 65, exceeded once in 10,000 runs of a correct rule; the seed makes it one run.
    """
    vocab, length, draws = 3, 3, 60_000
    generator = torch.Generator().manual_seed(3)
    # law[prefix] is the verifier's next-token distribution; a prefix is a tuple of tokens.
    law = {
        prefix: torch.softmax(1.5 * torch.randn(vocab, generator=generator), dim=0)
        for n in range(length)
        for prefix in product(range(vocab), repeat=n)
    }
    expected = {
        sequence: float(torch.stack([law[sequence[:n]][sequence[n]] for n in range(length)]).prod())
        for sequence in product(range(vocab), repeat=length)
    }

    def draft_of(prefix: tuple[int, ...]) -> list[int]:
        drafts: list[int] = []
        while len(prefix) + len(drafts) < length:
            drafts.append(int(law[(*prefix, *drafts)].argmax()))
        return drafts

    counts: Counter[tuple[int, ...]] = Counter()
    verifies = 0
    pending: Counter[tuple[int, ...]] = Counter({(): draws})
    while pending:
        prefix, n = pending.popitem()
        if len(prefix) == length:
            counts[prefix] += n
            continue
        drafts = draft_of(prefix)
        # y_i is drawn given the draft's first i tokens; the anchor's id does not matter here.
        targets = torch.stack(
            [
                law[(*prefix, *drafts[:i])].multinomial(n, replacement=True, generator=generator)
                for i in range(len(drafts))
            ],
            dim=1,
        )
        block = torch.tensor([[0, *drafts[:-1]]]).expand(n, -1)
        got = accept_match(block, targets, torch.zeros(n, dtype=torch.int64))
        verifies += n
        for row, keep in zip(got.output_ids.tolist(), got.commit_len.tolist(), strict=True):
            pending[(*prefix, *row[:keep])] += 1

    assert verifies < 0.75 * draws * length  # drafts were accepted, else this proves nothing
    chi_square = sum((counts[s] - draws * p) ** 2 / (draws * p) for s, p in expected.items())
    assert chi_square < 65
