"""The accept rules by brute force: every draft, every outcome, against the verifier's own law.

Nothing is sampled. A rule draws by comparing uniforms with boundaries; one point inside each cell
stands for the whole cell, with its measure, and goes through the rule itself. What remains is
rounding in float64.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

import pytest
import torch
from dflash_kernels.accept_match import accept_match
from dflash_kernels.block_verify import reference
from dflash_kernels.block_verify.reference import (
    bonus_weights,
    keep_probs,
    last_draft,
    proposed_probs,
    running_ratios,
)
from dflash_kernels.types import Acceptance, Proposal
from torch import Tensor

from dflash_sglang.core import accept
from dflash_sglang.core.accept import Rule, Thresholds

ROUNDING = 1e-12  # a few hundred float64 products and sums
VOCAB = 3
Sequence = tuple[int, ...]
Law = dict[Sequence, Tensor]  # next-token distribution after each prefix


def random_law(length: int, seed: int, sharpness: float = 1.5) -> Law:
    generator = torch.Generator().manual_seed(seed)
    return {
        prefix: torch.softmax(
            sharpness * torch.randn(VOCAB, generator=generator, dtype=torch.float64), dim=0
        )
        for n in range(length)
        for prefix in product(range(VOCAB), repeat=n)
    }


def joint(law: Law, length: int) -> dict[Sequence, float]:
    """The law of whole sequences."""
    return {
        s: float(torch.stack([law[s[:n]][s[n]] for n in range(length)]).prod())
        for s in product(range(VOCAB), repeat=length)
    }


def completed(
    runs: Iterator[tuple[Sequence, float]], law: Law, length: int
) -> dict[Sequence, float]:
    """The law of sequences that start as a committed run and go on as the verifier does."""
    mass: dict[Sequence, float] = defaultdict(float)
    for run, weight in runs:
        for tail in product(range(VOCAB), repeat=length - len(run)):
            whole, w = run, weight
            for token in tail:
                w *= float(law[whole][token])
                whole = (*whole, token)
            mass[whole] += w
    return mass


def distance(p: dict[Sequence, float], q: dict[Sequence, float]) -> float:
    """Total variation."""
    return 0.5 * sum(abs(p.get(s, 0.0) - q.get(s, 0.0)) for s in {*p, *q})


class Block(NamedTuple):
    """A block of sampled drafts and everything that a rule is given, one row."""

    draft_ids: Tensor
    proposal: Proposal
    verifier_probs: Tensor
    probability: float  # with which these drafts are drawn


def blocks(law: Law, proposal: Proposal) -> Iterator[Block]:
    """Every block that the proposal can draw."""
    top_ids, top_probs = proposal
    width = top_ids.shape[1] + 1
    for choice in product(range(top_ids.shape[2]), repeat=width - 1):
        drafts = [int(top_ids[0, i, k]) for i, k in enumerate(choice)]
        yield Block(
            torch.tensor([[0, *drafts]]),
            proposal,
            torch.stack([law[tuple(drafts[:i])] for i in range(width)])[None],
            float(
                torch.stack(
                    [top_probs[0, i, k] for i, k in enumerate(choice)] or [torch.ones(())]
                ).prod()
            ),
        )


def make_proposal(width: int, top_k: int, seed: int) -> Proposal:
    generator = torch.Generator().manual_seed(seed)
    order = [torch.randperm(VOCAB, generator=generator)[:top_k] for _ in range(width - 1)]
    scores = torch.randn(1, width - 1, top_k, generator=generator, dtype=torch.float64)
    ids = torch.stack(order)[None] if order else torch.empty(1, 0, top_k, dtype=torch.int64)
    return Proposal(ids, torch.softmax(scores, dim=-1))


def cells(boundary: float) -> list[tuple[float, float]]:
    """(a point inside, measure) of the two cells that a boundary cuts [0, 1) into."""
    boundary = min(max(boundary, 0.0), 1.0)
    both = [(boundary / 2, boundary), ((boundary + 1) / 2, 1 - boundary)]
    return [cell for cell in both if cell[1] > 0]


def quantiles(weights: Tensor) -> list[tuple[float, float]]:
    """(a point inside, measure) of each token's cell."""
    share = (weights / weights.sum()).tolist()
    start, found = 0.0, []
    for measure in share:
        if measure > 0:
            found.append((start + measure / 2, measure))
        start += measure
    return found


def run_of(block: Block, got: Acceptance) -> Sequence:
    keep = int(got.commit_len[0])
    assert got.output_ids[0, keep - 1] == got.bonus_ids[0]
    return tuple(got.output_ids[0, :keep].tolist())


def outcomes(rule: Rule, block: Block, limit: int | None) -> Iterator[tuple[Sequence, float]]:
    """Every committed run of a block with its probability."""
    draft_ids, proposal, verifier_probs, _ = block
    given = None if limit is None else torch.tensor([limit], dtype=torch.int32)
    last = last_draft(draft_ids, given)
    ratios = running_ratios(draft_ids, proposal, verifier_probs)
    if rule is Rule.BLOCK:
        keep = keep_probs(ratios, proposal, verifier_probs, last)[0].tolist()
    else:
        wanted = verifier_probs[:, :-1].gather(2, draft_ids[:, 1:, None]).squeeze(2)
        keep = (wanted / proposed_probs(draft_ids, proposal))[0].tolist()
        ratios = torch.ones_like(ratios)

    def apply(uniforms: list[float]) -> Acceptance:
        drawn = torch.tensor([uniforms], dtype=torch.float64)
        prefix = torch.tensor([7])
        return accept.REJECTIONS[rule](
            draft_ids, proposal, verifier_probs, drawn, prefix, limit=given
        )

    for corner in product(*map(cells, keep)):
        decided = [point for point, _ in corner]
        accept_len = apply([*decided, 0.0]).accept_len.to(torch.int64)
        weights = bonus_weights(proposal, verifier_probs, accept_len, ratios[0, accept_len], last)
        for point, measure in quantiles(weights[0]):
            for _, part in corner:
                measure *= part
            yield run_of(block, apply([*decided, point])), measure


def law_of(
    rule: Rule, law: Law, proposal: Proposal, limit: int | None = None
) -> tuple[dict[Sequence, float], float]:
    """The law of sequences that a rule produces, and its mean committed length."""
    length = proposal.top_ids.shape[1] + 1
    runs = [
        (run, block.probability * weight)
        for block in blocks(law, proposal)
        for run, weight in outcomes(rule, block, limit)
    ]
    return completed(iter(runs), law, length), sum(len(run) * weight for run, weight in runs)


@pytest.mark.parametrize("rule", accept.REJECTIONS, ids=lambda rule: rule.name)
@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_sampled_drafts_keep_the_verifiers_law(rule: Rule, top_k: int, width: int) -> None:
    for seed in range(3):
        law = random_law(width, seed)
        got, _ = law_of(rule, law, make_proposal(width, top_k, seed + 50))
        assert distance(got, joint(law, width)) < ROUNDING


@pytest.mark.parametrize("rule", accept.REJECTIONS, ids=lambda rule: rule.name)
@pytest.mark.parametrize("limit", [0, 1, 2, 9])
def test_a_limit_keeps_the_law_and_shortens_the_run(rule: Rule, limit: int) -> None:
    law, proposal = random_law(4, 5), make_proposal(4, 3, 6)
    got, mean = law_of(rule, law, proposal, limit)
    assert distance(got, joint(law, 4)) < ROUNDING
    assert mean <= limit + 1 + ROUNDING


@pytest.mark.parametrize("rule", accept.REJECTIONS, ids=lambda rule: rule.name)
def test_drafts_from_the_verifiers_own_law_are_all_accepted(rule: Rule) -> None:
    # One position: there the proposal can equal the law, where both rules divide 0 by 0.
    law = random_law(2, 8)
    proposal = Proposal(torch.arange(VOCAB).view(1, 1, VOCAB), law[()].view(1, 1, VOCAB))
    got, mean = law_of(rule, law, proposal)
    assert distance(got, joint(law, 2)) < ROUNDING
    assert mean == pytest.approx(2, abs=ROUNDING)


def test_block_verification_commits_at_least_as_much() -> None:
    gains = []
    for seed in range(8):
        law, proposal = random_law(4, seed), make_proposal(4, 3, seed + 90)
        _, block = law_of(Rule.BLOCK, law, proposal)
        _, token = law_of(Rule.TOKEN_WISE, law, proposal)
        gains.append(block - token)
    assert min(gains) > -ROUNDING
    assert max(gains) > 0.01  # else the two rules are one


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("bonus_weights", lambda proposal, p, n, ratio, last: p[torch.arange(len(n)), n]),
        ("proposed_probs", lambda ids, proposal: torch.ones_like(ids[:, 1:], dtype=torch.float64)),
    ],
    ids=["bonus from the whole law", "proposal taken for a point mass"],
)
def test_a_wrong_rule_is_noticed(
    name: str, wrong: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, name, wrong)
    monkeypatch.setitem(globals(), name, wrong)  # the same mistake in the cells' boundaries
    law = random_law(3, 1)
    got, _ = law_of(Rule.TOKEN_WISE, law, make_proposal(3, 3, 2))
    assert distance(got, joint(law, 3)) > 0.01


def matched(law: Law, drafts: Sequence, thresholds: Thresholds) -> Iterator[tuple[Sequence, float]]:
    """Every run of argmax-style drafts under sample and match, relaxed by the thresholds."""
    width = len(drafts) + 1
    rows = torch.stack([law[drafts[:i]] for i in range(width)])
    draft_ids = torch.tensor([[0, *drafts]])
    for target in product(range(VOCAB), repeat=width):
        drawn = float(torch.stack([rows[i, y] for i, y in enumerate(target)]).prod())
        verifier_ids = torch.tensor([target])
        p = [float(rows[i, d]) for i, d in enumerate(drafts)]
        edges = [(min(1, x / thresholds.acc) - x) / (1 - x) for x in p]
        for corner in product(*map(cells, edges)):
            points = torch.tensor([[u for u, _ in corner]], dtype=torch.float64)
            extra_accept = accept.relaxed(
                draft_ids, verifier_ids, rows[None], points.view(1, -1), thresholds
            )
            got = accept_match(
                draft_ids,
                verifier_ids,
                torch.tensor([7]),
                extra_accept=None if thresholds.exact else extra_accept,
            )
            weight = drawn
            for _, part in corner:
                weight *= part
            yield tuple(got.output_ids[0, : got.commit_len[0]].tolist()), weight


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_sample_and_match_keeps_the_verifiers_law(width: int) -> None:
    law = random_law(width, 3)
    for drafts in product(range(VOCAB), repeat=width - 1):
        got = completed(matched(law, drafts, Thresholds(1.0, 1.0)), law, width)
        assert distance(got, joint(law, width)) < ROUNDING


@pytest.mark.parametrize(
    "thresholds",
    [Thresholds(1.0, 0.5), Thresholds(0.3, 1.0), Thresholds(0.4, 0.7)],
    ids=["acc", "single", "both"],
)
def test_the_relaxed_rule_accepts_with_the_documented_probability(thresholds: Thresholds) -> None:
    law = random_law(2, 4, sharpness=0.5)  # no draft is nearly certain
    seen_more = False
    for draft in range(VOCAB):
        p = law[()]
        first: dict[int, float] = defaultdict(float)
        for run, weight in matched(law, (draft,), thresholds):
            first[run[0]] += weight
        chance = min(1.0, float(p[draft]) / thresholds.acc)
        if thresholds.single < 1 and p[draft] >= thresholds.single:
            chance = 1.0
        seen_more |= chance > float(p[draft]) + 0.05
        for token in range(VOCAB):
            elsewhere = (1 - chance) * float(p[token] / (1 - p[draft]))
            expected = chance if token == draft else elsewhere
            assert first[token] == pytest.approx(expected, abs=ROUNDING)
    assert seen_more


def test_thresholds_of_one_add_nothing() -> None:
    p = torch.tensor([[[1.0, 0.0], [0.5, 0.5]]])
    for u in (0.0, 0.5, 0.999):
        extra_accept = accept.relaxed(
            torch.tensor([[0, 1]]),
            torch.tensor([[0, 0]]),
            p,
            torch.tensor([[u]]),
            Thresholds(1.0, 1.0),
        )
        assert not extra_accept.any()


def test_rows_of_two_rules_share_a_batch() -> None:
    zeros, ones = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
    first = Acceptance(zeros, zeros, zeros, zeros[:, None].repeat(1, 4), zeros)
    second = Acceptance(ones, ones, ones, ones[:, None].repeat(1, 4), ones)
    got = accept.by_row(torch.tensor([True, False]), first, second)
    assert got.accept_len.tolist() == [0, 1]
    assert got.output_ids.tolist() == [[0] * 4, [1] * 4]
