"""Penalties along the block against a reference that loops over requests, positions and tokens."""

import pytest
import torch

from dflash_sglang.core.penalties import (
    PenaltyParams,
    additive_penalties,
    apply_penalties,
    count_committed,
    counts_along,
    scaling_penalties,
)

NEG_INF = float("-inf")


def params_of(*rows: tuple[float, float, float, int, list[int]], vocab: int) -> PenaltyParams:
    width = max(len(stops) for *_, stops in rows)
    return PenaltyParams(
        frequency=torch.tensor([row[0] for row in rows]),
        presence=torch.tensor([row[1] for row in rows]),
        repetition=torch.tensor([row[2] for row in rows]),
        min_new_tokens=torch.tensor([row[3] for row in rows]),
        stop_ids=torch.tensor([row[4] + [vocab] * (width - len(row[4])) for row in rows]),
    )


def penalised_by_loop(
    logits: torch.Tensor, output: list[int], row: tuple[float, float, float, int, list[int]]
) -> list[float]:
    """One position's logits, from the whole output before it."""
    frequency, presence, repetition, min_new_tokens, stops = row
    result = []
    for token, logit in enumerate(logits.tolist()):
        n = output.count(token)
        value = logit - frequency * n - (presence if n else 0.0)
        if token in stops and len(output) < min_new_tokens:
            value = NEG_INF
        if n:
            value = value * repetition if value < 0 else value / repetition
        result.append(value)
    return result


@pytest.mark.parametrize("width", [1, 2, 7])
def test_matches_the_rules_position_by_position(width: int) -> None:
    vocab, generator = 11, torch.Generator().manual_seed(width)
    rows = (
        (1.8, 0.0, 1.0, 0, [2]),
        (0.0, 1.5, 1.0, 9, [2, 5]),
        (0.0, 0.0, 1.7, 0, [2]),
        (-0.5, 0.3, 0.6, 4, [0]),  # negative penalties reward; a factor below 1 too
        (0.0, 0.0, 1.0, 0, [2]),
    )
    outputs = [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in (1, 5, 3, 8, 2)]
    # Column 0 is the anchor, already part of the output; few tokens, so that drafts repeat.
    drafts = torch.randint(0, 4, (len(rows), width), generator=generator)
    for output, draft in zip(outputs, drafts.tolist(), strict=True):
        output.append(draft[0])
    counts = torch.stack([torch.bincount(torch.tensor(o), minlength=vocab) for o in outputs])
    logits = torch.randn(len(rows), width, vocab, generator=generator)
    output_lens = torch.tensor([[len(o) + i for i in range(width)] for o in outputs])

    along = counts_along(counts.to(torch.int32), drafts)
    got = apply_penalties(logits, along, output_lens, params_of(*rows, vocab=vocab))

    for n, row in enumerate(rows):
        for i in range(width):
            output = outputs[n] + drafts[n, 1 : i + 1].tolist()
            expected = penalised_by_loop(logits[n, i], output, row)
            # float32 against Python's float64: rounding of a product and a sum.
            torch.testing.assert_close(got[n, i], torch.tensor(expected), rtol=1e-6, atol=1e-6)


def test_additive_then_scaling_is_what_the_sampler_is_handed() -> None:
    # Prefill gives SGLang the two parts; together they must be the rule used for the blocks.
    vocab = 6
    params = params_of((0.7, 0.2, 1.3, 3, [1]), vocab=vocab)
    counts = torch.tensor([[[0, 0, 2, 1, 0, 0]]], dtype=torch.int32)
    output_lens = torch.tensor([[2]])
    logits = torch.tensor([[[1.0, 2.0, 0.5, -1.0, 3.0, 0.0]]])
    added = logits + additive_penalties(counts, output_lens, params)
    scale = scaling_penalties(counts, params)
    expected = torch.where(added < 0, added * scale, added / scale)
    got = apply_penalties(logits, counts, output_lens, params)
    assert torch.equal(got, expected)
    assert got[0, 0, 1] == NEG_INF


def test_a_stop_token_is_held_back_until_exactly_min_new_tokens() -> None:
    vocab = 4
    params = params_of((0.0, 0.0, 1.0, 3, [2]), vocab=vocab)
    counts = torch.zeros(1, 5, vocab, dtype=torch.int32)
    got = apply_penalties(torch.zeros(1, 5, vocab), counts, torch.arange(5)[None], params)
    assert (got[0, :, 2] == NEG_INF).tolist() == [True, True, True, False, False]
    assert torch.isfinite(got[..., [0, 1, 3]]).all()


def test_only_committed_tokens_are_counted() -> None:
    counts = torch.zeros(3, 5, dtype=torch.int32)
    output_ids = torch.tensor([[1, 1, 2], [3, 3, 3], [4, 0, 0]])
    got = count_committed(counts, output_ids, torch.tensor([2, 3, 1], dtype=torch.int32))
    assert got.tolist() == [[0, 2, 0, 0, 0], [0, 0, 0, 3, 0], [0, 0, 0, 0, 1]]
    assert counts.sum() == 0
