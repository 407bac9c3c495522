"""The sampled accept's reference: SGLang's own draws, the verifier's distribution, the accept."""

import pytest
import torch
from dflash_kernels.accept_match import accept_match
from dflash_kernels.accept_sampled import accept_sampled
from dflash_kernels.accept_sampled.hashing import murmur_hash32
from sglang.srt.layers import sampler


def test_draws_what_sglangs_seeded_sampler_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row by row, with the arithmetic of `Sampler.forward` for requests without filters.

    SGLang rounds log(softmax) to float32 first, this op does not: they part where two scores are
    within about 1e-6, once in a million rows. There are 1,280 here.
    """
    monkeypatch.setattr(sampler, "murmur_hash32", murmur_hash32)
    bs, width, vocab = 160, 8, 2000
    generator = torch.Generator().manual_seed(11)
    logits = 3 * torch.randn(bs * width, vocab, generator=generator)
    prefix_lens = torch.randint(0, 100_000, (bs,), generator=generator)
    temperatures = 0.2 + 1.5 * torch.rand(bs, generator=generator)
    seeds = torch.randint(0, 2**63 - 1, (bs,), generator=generator)
    draft_ids = torch.zeros(bs, width, dtype=torch.int64)

    got = accept_sampled(logits, draft_ids, prefix_lens, temperatures, seeds)

    probs = torch.softmax(logits / temperatures.repeat_interleave(width)[:, None], dim=-1)
    positions = (prefix_lens[:, None] + torch.arange(width)).flatten()
    with torch.compiler.set_stance("force_eager"):
        theirs = sampler.sampling_from_probs_torch(
            probs, sampling_seed=seeds.repeat_interleave(width), positions=positions
        )
    assert torch.equal(got.output_ids.flatten(), theirs.long())


def test_draws_follow_the_distribution() -> None:
    """Chi-square of the first token over fresh seeds: 11 degrees of freedom, 0.9999 quantile 37.4.

    The seeds are fixed, so this is one run of a test that a correct op fails once in 10,000.
    """
    draws, vocab, temperature = 20_000, 12, 0.7
    generator = torch.Generator().manual_seed(12)
    logits = 1.5 * torch.randn(vocab, generator=generator)
    got = accept_sampled(
        logits.expand(draws, vocab),
        torch.zeros(draws, 1, dtype=torch.int64),
        torch.full((draws,), 77),
        torch.full((draws,), temperature),
        torch.randint(0, 2**63 - 1, (draws,), generator=generator),
    )
    expected = draws * torch.softmax(logits.double() / temperature, dim=0)
    counts = got.output_ids[:, 0].bincount(minlength=vocab)
    assert float(((counts - expected) ** 2 / expected).sum()) < 37.4


def test_accepts_by_the_rule_of_accept_match() -> None:
    generator = torch.Generator().manual_seed(13)
    bs, width, vocab = 200, 5, 3
    given = (
        torch.randn(bs * width, vocab, generator=generator),
        torch.randint(0, vocab, (bs, width), generator=generator),
        torch.randint(0, 1000, (bs,), generator=generator),
    )
    temperatures = torch.ones(bs)
    temperatures[::3] = 0.0
    limit = torch.randint(0, width, (bs,), generator=generator, dtype=torch.int32)
    got = accept_sampled(*given, temperatures, torch.arange(bs), limit=limit)
    logits, draft_ids, prefix_lens = given
    expected = accept_match(draft_ids, got.output_ids, prefix_lens, limit=limit)
    assert all(map(torch.equal, got, expected))
    greedy = logits.view(bs, width, vocab)[::3].argmax(-1)
    assert torch.equal(got.output_ids[::3], greedy)


def test_a_draw_depends_on_its_position_not_on_the_block() -> None:
    # The same text with and without speculation: a token's draw may not depend on how many were
    # verified with it, nor on where in the block it stood.
    generator = torch.Generator().manual_seed(14)
    logits = torch.randn(4, 500, generator=generator)
    one, seed = torch.ones(1), torch.tensor([99])
    block = accept_sampled(
        logits, torch.zeros(1, 4, dtype=torch.int64), torch.tensor([20]), one, seed
    )
    for i in range(4):
        alone = accept_sampled(
            logits[i : i + 1],
            torch.zeros(1, 1, dtype=torch.int64),
            torch.tensor([20 + i]),
            one,
            seed,
        )
        assert alone.output_ids[0, 0] == block.output_ids[0, i]


def test_nan_counts_as_impossible() -> None:
    logits = torch.tensor([[torch.nan, -torch.inf, 0.0]])
    zero = torch.zeros(1, dtype=torch.int64)
    for temperature in (0.0, 1.0):
        got = accept_sampled(logits, zero[None], zero, torch.tensor([temperature]), zero)
        assert got.output_ids.tolist() == [[2]]
