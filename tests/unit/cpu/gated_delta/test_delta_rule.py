"""The gated delta rule: prefill, decode and verify are one recurrence, transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash_sglang.cpu.gated_delta.delta_rule import CHUNK
from tests.unit.cpu.gated_delta import cases
from tests.unit.cpu.gated_delta.cases import HEADS, SLOTS, K, V

# Orders of rounding in float64, through decays from 1 to e^-20.
CLOSE: dict[str, Any] = {"atol": 1e-11, "rtol": 1e-9}
LENGTHS = [CHUNK + 1, 1, 2 * CHUNK, CHUNK - 1, 3, 150]  # 150: two chunks and a part


@pytest.mark.parametrize(
    "name", ["torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"]
)
@pytest.mark.parametrize("length", [1, 3, CHUNK, CHUNK + 1, 150])
def test_prefill_is_transformers_rule(random: torch.Generator, length: int, name: str) -> None:
    layer, tokens = cases.random_layer(random), cases.random_tokens(length, random)
    states = cases.random_states(random)
    expected, last = cases.transformers_rule(name, layer, tokens, states[7])
    output, _ = cases.prefill(layer, tokens, states, torch.tensor([7]), [length])
    torch.testing.assert_close(output, expected, **CLOSE)
    torch.testing.assert_close(states[7], last, **CLOSE)


def test_a_ragged_prefill_is_each_requests_decoding(random: torch.Generator) -> None:
    """Catches a token of another request, a padding token that counts, a state left behind."""
    layer, tokens = cases.random_layer(random), cases.random_tokens(sum(LENGTHS), random)
    states = cases.random_states(random)
    untouched = states.clone()
    slots = torch.tensor([3, 19, 4, 8, 1, 12], dtype=torch.int32)
    by_token, output = states.clone(), torch.empty(sum(LENGTHS), HEADS, V, dtype=cases.DTYPE)
    starts = torch.tensor([0, *LENGTHS]).cumsum(0)
    at_chunks = []
    for slot, begin, length in zip(slots.tolist(), starts.tolist(), LENGTHS, strict=False):
        for i in range(length):
            if i % CHUNK == 0:
                at_chunks.append(by_token[slot].clone())
            row = torch.tensor([begin + i])
            output[row] = cases.decode(layer, tokens.rows(row), by_token, torch.tensor([slot]))
    got, chunks = cases.prefill(layer, tokens, states, slots, LENGTHS)
    torch.testing.assert_close(got, output, **CLOSE)
    torch.testing.assert_close(states, by_token, **CLOSE)
    torch.testing.assert_close(chunks, torch.stack(at_chunks), **CLOSE)
    others = [slot for slot in range(SLOTS) if slot not in slots.tolist()]
    assert torch.equal(states[others], untouched[others])


def test_padding_goes_to_the_slot_kept_for_it(random: torch.Generator) -> None:
    layer, tokens = cases.random_layer(random), cases.random_tokens(2, random)
    states = cases.random_states(random)
    untouched = states.clone()
    cases.decode(layer, tokens, states, torch.tensor([-1, 5]))
    assert torch.equal(states[SLOTS - 1], untouched[SLOTS - 1])
    assert not torch.equal(states[5], untouched[5])


@pytest.mark.parametrize("width", [1, 2, 7, 16])
def test_a_verify_keeps_the_state_after_every_token(random: torch.Generator, width: int) -> None:
    requests = 3
    layer, tokens = cases.random_layer(random), cases.random_tokens(requests * width, random)
    states = cases.random_states(random)
    untouched, by_token = states.clone(), states.clone()
    slots = torch.tensor([5, 2, 11])
    rows = torch.arange(requests * width).view(requests, width)
    kept = torch.full((requests + 2, 16, HEADS, V, K), torch.nan, dtype=cases.DTYPE)
    kept_rows = torch.tensor([2, 0, 4, 1])
    output = cases.verify_with_snapshots(layer, tokens, states, slots, kept, kept_rows)
    for step in range(width):
        expected = cases.decode(layer, tokens.rows(rows[:, step]), by_token, slots)
        torch.testing.assert_close(output[rows[:, step]], expected, **CLOSE)
        torch.testing.assert_close(kept[[2, 0, 4], step], by_token[slots], **CLOSE)
    assert torch.equal(states, untouched)  # a rejected draft must leave no trace
    assert kept[[1, 3]].isnan().all()


def test_long_decays_do_not_overflow(random: torch.Generator) -> None:
    """A chunk that forgets all of itself: the quotient of two exponentials would be 0 / 0."""
    layer = cases.random_layer(random)._replace(a_log=torch.full((HEADS,), 4.0))
    tokens = cases.random_tokens(CHUNK, random)
    tokens = tokens._replace(a=tokens.a.abs() + 20)
    states = cases.random_states(random).float()
    float_tokens = type(tokens)(*(part.float() for part in tokens))
    output, _ = cases.prefill(layer, float_tokens, states, torch.tensor([1]), [CHUNK])
    assert output.isfinite().all()
    assert states.isfinite().all()
