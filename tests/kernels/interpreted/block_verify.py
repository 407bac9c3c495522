"""`block_verify` and `token_wise`: Triton against the references, uniform for uniform."""

from itertools import product

import pytest
import torch
from dflash_kernels.block_verify import cases, kernel, reference
from dflash_kernels.block_verify.reference import (
    bonus_weights,
    keep_probs,
    last_draft,
    proposed_probs,
    running_ratios,
)
from dflash_kernels.case import Case, Inputs
from dflash_kernels.types import Proposal
from torch.library import opcheck

from tests.support.kernel_cases import assert_equal, run_case
from tests.support.memory_traffic import bytes_moved


@pytest.mark.parametrize("case", [*cases.GRID, *cases.CASES], ids=lambda case: case.name)
def test_kernel_equals_reference(case: Case) -> None:
    assert_equal(run_case("block_verify", case))


def cells(boundary: float) -> list[tuple[float, float]]:
    """(a point inside, measure) of the two cells that a boundary cuts [0, 1) into."""
    boundary = min(max(boundary, 0.0), 1.0)
    both = [(boundary / 2, boundary), ((boundary + 1) / 2, 1 - boundary)]
    return [cell for cell in both if cell[1] > 0]


@pytest.mark.parametrize("rule", cases.RULES)
def test_the_distribution_is_the_verifiers(rule: str) -> None:
    """Every pair of drafts and every cell of the uniforms, three tokens: nothing is sampled.

    The verifier's distribution here does not depend on the drafts, so n committed tokens have to
    have the product of their rows' probabilities, whatever follows.
    """
    width, vocab = 3, 3
    generator = torch.Generator().manual_seed(11)
    rows = torch.randn(1, width, vocab, generator=generator, dtype=torch.float64).softmax(2)
    scores = torch.randn(1, width - 1, vocab, generator=generator, dtype=torch.float64)
    ids = torch.arange(vocab).expand(1, width - 1, vocab).contiguous()
    proposal = Proposal(ids, scores.softmax(2))
    points: list[tuple[tuple[int, ...], list[float], float]] = []
    for drafts in product(range(vocab), repeat=width - 1):
        drawn = float(
            torch.stack([proposal.top_probs[0, i, x] for i, x in enumerate(drafts)]).prod()
        )
        draft_ids = torch.tensor([[0, *drafts]])
        ratios = running_ratios(draft_ids, proposal, rows)
        last = last_draft(draft_ids, None)
        if rule == "block_verify":
            edges = keep_probs(ratios, proposal, rows, last)[0].tolist()
        else:
            wanted = rows[0, :-1].gather(1, draft_ids[0, 1:, None]).squeeze(1)
            edges = (wanted / proposed_probs(draft_ids, proposal)[0]).tolist()
            ratios = torch.ones_like(ratios)
        for corner in product(*map(cells, edges)):
            decided = [point for point, _ in corner]
            measure = drawn * float(
                torch.tensor([m for _, m in corner], dtype=torch.float64).prod()
            )
            given = cases.Given(
                draft_ids, proposal, rows, torch.tensor([[*decided, 0.0]]).double(), last
            )
            accept_len = getattr(reference, rule)(*given).accept_len.long()
            weights = bonus_weights(proposal, rows, accept_len, ratios[0, accept_len], last)[0]
            share, start = (weights / weights.sum()).tolist(), 0.0
            for part in share:
                if part > 0:
                    points.append((drafts, [*decided, start + part / 2], measure * part))
                start += part
    n = len(points)
    got = getattr(kernel, rule)(
        torch.tensor([[0, *drafts] for drafts, _, _ in points]),
        Proposal(*(columns.repeat(n, 1, 1) for columns in proposal)),
        rows.repeat(n, 1, 1),
        torch.tensor([uniforms for _, uniforms, _ in points], dtype=torch.float64),
        torch.zeros(n, dtype=torch.int64),
    )
    law = torch.zeros(vocab, vocab, vocab, dtype=torch.float64)
    for output, length, (_, _, measure) in zip(got.output_ids, got.commit_len, points, strict=True):
        tail = [rows[0, i] for i in range(int(length), width)]
        committed = tuple(output[: int(length)].tolist())
        whole = torch.tensor(measure, dtype=torch.float64)
        for row in tail:
            whole = whole[..., None] * row
        law[committed] += whole
    expected = rows[0, 0][:, None, None] * rows[0, 1][None, :, None] * rows[0, 2]
    # A few hundred float64 products and sums.
    torch.testing.assert_close(law, expected, rtol=0, atol=1e-12)


def test_reads_one_row_a_request() -> None:
    given = cases.requests(Inputs("cpu", 1), 4, 16, 40_000, 20)
    floor = 4 * 40_000 * 4
    proposals = 4 * 15 * 20 * (8 + 4 + 4)  # id, q and p of each proposed token
    moved = bytes_moved(lambda: kernel.block_verify(*given))
    # Besides: 32 bytes a tile of 8 kB, the proposal's ids in every tile, the drawn tile again.
    assert floor + proposals < moved < 1.12 * floor + proposals


@pytest.mark.parametrize("rule", cases.RULES)
def test_as_a_custom_op(rule: str) -> None:
    # The op behind the public functions: argument order, and a fake with the real shapes.
    given = cases.requests(Inputs("cpu", 1), 5, 4, 100, 3)
    limit = torch.tensor([0, 1, 3, 3, 9], dtype=torch.int32)
    arguments = (given.draft_ids, *given.proposal, *given[2:], limit, rule == "block_verify")
    op = torch.ops.dflash.block_verify.default
    opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))
    expected = getattr(reference, rule)(*given, limit=limit)
    assert all(map(torch.equal, op(*arguments), expected))
