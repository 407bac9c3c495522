"""`block_verify` and `token_wise`: Triton against the references, uniform for uniform."""

from itertools import product
from typing import NamedTuple

import pytest
import torch
from dflash_kernels.block_verify import (
    bonus_weights,
    draw,
    keep_probs,
    kernel,
    last_draft,
    proposed_probs,
    reference,
    running_ratios,
)
from dflash_kernels.types import Acceptance, Proposal
from torch import Tensor
from torch.library import opcheck

from tests.support.memory_traffic import bytes_moved

RULES = ["block_verify", "token_wise"]


class Given(NamedTuple):
    """Arguments of both rules."""

    draft_ids: Tensor
    proposal: Proposal
    verifier_probs: Tensor
    uniforms: Tensor
    prefix_lens: Tensor


def compare(rule: str, given: Given, limit: Tensor | None = None) -> Acceptance:
    """Both decide in float64: every number must be the same."""
    got = getattr(kernel, rule)(*given, limit=limit)
    expected = getattr(reference, rule)(*given, limit=limit)
    for name, ours, theirs in zip(Acceptance._fields, got, expected, strict=True):
        assert ours.dtype == theirs.dtype, name
        assert torch.equal(ours, theirs), name
    return got


def requests(bs: int, width: int, columns: int, top: int, elsewhere: float = 0.2) -> Given:
    """Drafts drawn from a proposal that resembles the verifier's distribution.

    The verifier has a probability of `elsewhere` at tokens that are not proposed, and disagrees
    about the others by a factor of two or so: ratios below 1 and runs of every length.
    """
    generator = torch.Generator().manual_seed(bs * 1009 + width * 31 + columns + top)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    top_ids = noise(bs, width - 1, columns).topk(top, dim=2).indices
    scores = noise(bs, width - 1, top)
    top_probs = scores.softmax(dim=2)
    verifier_probs = elsewhere * (2 * noise(bs, width, columns)).softmax(dim=2)
    agreed = (scores + 0.7 * noise(bs, width - 1, top)).softmax(dim=2)
    verifier_probs[:, :-1].scatter_add_(2, top_ids, (1 - elsewhere) * agreed)
    verifier_probs /= verifier_probs.sum(dim=2, keepdim=True)
    chance = torch.rand(bs * (width - 1), generator=generator)
    choice = draw(top_probs.reshape(-1, top), chance).view(bs, width - 1, 1)
    draft_ids = torch.randint(0, columns, (bs, width), generator=generator)
    draft_ids[:, 1:] = top_ids.gather(2, choice).squeeze(2)
    prefix_lens = torch.randint(0, 2**33, (bs,), generator=generator)
    uniforms = torch.rand(bs, width, generator=generator)
    return Given(draft_ids, Proposal(top_ids, top_probs), verifier_probs, uniforms, prefix_lens)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("columns", [20, 2047, 2049, 5000])
@pytest.mark.parametrize(("bs", "width", "top"), [(1, 1, 5), (3, 5, 1), (7, 2, 3), (4, 16, 20)])
def test_odd_sizes(rule: str, bs: int, width: int, top: int, columns: int) -> None:
    compare(rule, requests(bs, width, columns, top))


@pytest.mark.parametrize("rule", RULES)
def test_every_length_and_every_tile_of_the_bonus(rule: str) -> None:
    got = compare(rule, requests(48, 4, 5000, 8, elsewhere=0.4))
    assert set(got.accept_len.tolist()) == {0, 1, 2, 3}
    assert set((got.bonus_ids // kernel.TILE).tolist()) == {0, 1, 2}


def test_the_residual_has_the_ratio_of_its_position() -> None:
    given = requests(48, 4, 300, 8)
    accept_len = compare("block_verify", given).accept_len.to(torch.int64)[:, None]
    ratios = running_ratios(given.draft_ids, given.proposal, given.verifier_probs)
    inside = (accept_len < 3) & (ratios.gather(1, accept_len) < 0.9)
    assert inside.sum() >= 5  # else the case says nothing


@pytest.mark.parametrize("rule", RULES)
def test_limit(rule: str) -> None:
    limit = (torch.arange(36) % 6 - 1).to(torch.int32)
    compare(rule, requests(36, 4, 64, 6), limit=limit)


@pytest.mark.parametrize("rule", RULES)
def test_tokens_that_the_filters_removed_are_never_committed(rule: str) -> None:
    # Top-k of the verifier left few ids; some proposed ones have no probability at all.
    given = requests(40, 4, 4200, 6)
    kept = given.verifier_probs.topk(3, dim=2)
    filtered = torch.zeros_like(given.verifier_probs).scatter_(2, kept.indices, kept.values)
    filtered /= filtered.sum(dim=2, keepdim=True)
    uniforms = given.uniforms.clone()
    uniforms[::2, -1] = 1 - 2.0**-24  # the largest float32 below 1: the last id with weight
    uniforms[1::4, -1] = 0.0  # the first
    got = compare(rule, given._replace(verifier_probs=filtered, uniforms=uniforms))
    row = torch.arange(40)
    assert (filtered[row, got.accept_len.long(), got.bonus_ids] > 0).all()


@pytest.mark.parametrize("rule", RULES)
def test_drafts_from_the_verifiers_own_law_are_all_accepted(rule: str) -> None:
    # p = q at every position, where the rules divide 0 by 0. Powers of two: sums are exact.
    top_ids = torch.arange(8).expand(5, 3, 8).contiguous()
    proposal = Proposal(top_ids, torch.full((5, 3, 8), 0.125))
    verifier_probs = torch.zeros(5, 4, 12)
    verifier_probs[..., :8] = 0.125
    generator = torch.Generator().manual_seed(3)
    draft_ids = torch.randint(0, 8, (5, 4), generator=generator)
    uniforms = torch.rand(5, 4, generator=generator)
    given = Given(draft_ids, proposal, verifier_probs, uniforms, torch.arange(5))
    assert compare(rule, given).accept_len.tolist() == [3] * 5


def test_a_residual_without_mass_gives_the_whole_distribution() -> None:
    # Token-wise, p = q but for a hair at the draft, and a uniform between them: rejected, and
    # nothing of p is above q.
    below = torch.nextafter(torch.tensor(0.5), torch.tensor(0.0))
    proposal = Proposal(torch.tensor([[[1, 2]]]), torch.tensor([[[0.5, 0.5]]]))
    verifier_probs = torch.tensor([[[0.0, below, 0.5, 0.0]]]).repeat(1, 2, 1)
    uniforms = torch.tensor([[1 - 2.0**-24, 0.75]])
    given = Given(torch.tensor([[0, 1]]), proposal, verifier_probs, uniforms, torch.tensor([7]))
    got = compare("token_wise", given)
    assert got.accept_len.item() == 0
    assert got.bonus_ids.item() == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    given = requests(6, 4, 300, 5)
    compare("block_verify", given._replace(verifier_probs=given.verifier_probs.to(dtype)))


@pytest.mark.parametrize("rule", RULES)
def test_rows_may_lie_apart(rule: str) -> None:
    # A narrower verify takes slices of everything; the vocabulary may be padded.
    wide = requests(5, 8, 640, 4)
    padded = torch.full((5, 8, 700), 9.0)
    padded[..., :640] = wide.verifier_probs
    narrow = Given(
        wide.draft_ids[:, :4],
        Proposal(*(columns[:, :3] for columns in wide.proposal)),
        padded[:, :4, :640],
        wide.uniforms[:, :4],
        wide.prefix_lens.to(torch.int32),
    )
    compare(rule, narrow)


@pytest.mark.parametrize("apart", ["rows", "requests"])
def test_rows_may_lie_further_apart_than_int32_reaches(apart: str) -> None:
    bs, width = (1, 3) if apart == "rows" else (3, 2)
    given = requests(bs, width, 64, 3)
    far = 1 << 30
    memory = torch.empty(0, dtype=torch.bfloat16).set_(
        torch.UntypedStorage(2 * (2 * far + 256)),
        0,
        (bs, width, 64),
        (64, far, 1) if apart == "rows" else (far, 64, 1),
    )
    memory.copy_(given.verifier_probs)
    given = given._replace(verifier_probs=memory, uniforms=given.uniforms * 1e-3)
    for rule in RULES:
        assert compare(rule, given).accept_len.tolist() == [width - 1] * bs


def test_no_requests() -> None:
    given = requests(2, 3, 9, 2)
    none = Given(
        given.draft_ids[:0],
        Proposal(*(columns[:0] for columns in given.proposal)),
        given.verifier_probs[:0],
        given.uniforms[:0],
        given.prefix_lens[:0],
    )
    assert kernel.block_verify(*none).output_ids.shape == (0, 3)


def test_full_vocabulary() -> None:
    compare("block_verify", requests(2, 3, 248_320, 20))


def cells(boundary: float) -> list[tuple[float, float]]:
    """(a point inside, measure) of the two cells that a boundary cuts [0, 1) into."""
    boundary = min(max(boundary, 0.0), 1.0)
    both = [(boundary / 2, boundary), ((boundary + 1) / 2, 1 - boundary)]
    return [cell for cell in both if cell[1] > 0]


@pytest.mark.parametrize("rule", RULES)
def test_the_law_is_the_verifiers(rule: str) -> None:
    """Every pair of drafts and every cell of the uniforms, three tokens: nothing is sampled.

    The verifier's law here does not depend on the drafts, so a committed run of n tokens has to
    have the product of its rows' probabilities, whatever follows.
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
            given = Given(draft_ids, proposal, rows, torch.tensor([[*decided, 0.0]]).double(), last)
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
        run = tuple(output[: int(length)].tolist())
        whole = torch.tensor(measure, dtype=torch.float64)
        for row in tail:
            whole = whole[..., None] * row
        law[run] += whole
    expected = rows[0, 0][:, None, None] * rows[0, 1][None, :, None] * rows[0, 2]
    # A few hundred float64 products and sums.
    torch.testing.assert_close(law, expected, rtol=0, atol=1e-12)


def test_reads_one_row_a_request() -> None:
    given = requests(4, 16, 40_000, 20)
    floor = 4 * 40_000 * 4
    proposals = 4 * 15 * 20 * (8 + 4 + 4)  # id, q and p of each proposed token
    moved = bytes_moved(lambda: kernel.block_verify(*given))
    # Besides: 32 bytes a tile of 8 kB, the proposal's ids in every tile, the drawn tile again.
    assert floor + proposals < moved < 1.12 * floor + proposals


@pytest.mark.parametrize("rule", RULES)
def test_as_a_custom_op(rule: str) -> None:
    # The op behind the public functions: argument order, and a fake that tells the truth.
    given, limit = requests(5, 4, 100, 3), torch.tensor([0, 1, 3, 3, 9], dtype=torch.int32)
    draft_ids, proposal, *rest = given
    arguments = (draft_ids, *proposal, *rest, limit, rule == "block_verify")
    op = torch.ops.dflash.block_verify.default
    opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))
    expected = getattr(reference, rule)(*given, limit=limit)
    assert all(map(torch.equal, op(*arguments), expected))
