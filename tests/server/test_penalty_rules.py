"""Penalties by their definition: the rules, one token at a time, over the witness's raw logits.

SGLang's plain server applies several penalties at once in the order of a Python set, so it cannot
be asked about them. This reference can.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from bench.harness.requests import ask_all, greedy
from bench.harness.servers import TestedServer
from bench.harness.verifier_distribution import Witness
from tests.server.conftest import Reference

NUM_PROMPTS = 6
NEW_TOKENS = 90
PENALTIES: tuple[Mapping[str, Any], ...] = (
    {"frequency_penalty": 1.9},
    {"repetition_penalty": 1.9},
    {"presence_penalty": 1.5, "repetition_penalty": 1.4},
    {"frequency_penalty": 1.2, "presence_penalty": 0.8, "repetition_penalty": 1.2},
    {"min_new_tokens": 45, "frequency_penalty": 1.0},
    {"frequency_penalty": -0.6},
)


@pytest.fixture(scope="module")
def witness() -> Witness:
    return Witness()


def penalised(
    logits: Sequence[float], output: Sequence[int], rules: Mapping[str, Any], stop: int
) -> list[float]:
    """The rules as SGLang defines them, over the output only: added first, then scaled."""
    found = list(logits)
    for token in set(output):
        found[token] -= rules.get("frequency_penalty", 0.0) * output.count(token)
        found[token] -= rules.get("presence_penalty", 0.0)
    if len(output) < rules.get("min_new_tokens", 0):
        found[stop] = -math.inf
    scale = rules.get("repetition_penalty", 1.0)
    for token in set(output):
        found[token] = found[token] / scale if found[token] > 0 else found[token] * scale
    return found


def answers_by_definition(
    witness: Witness, prompt: str, rules: Mapping[str, Any]
) -> tuple[int, ...]:
    prompt_ids = witness.tokenizer(prompt)["input_ids"]
    output: list[int] = []
    while len(output) < NEW_TOKENS:
        logits = witness.logits([[*prompt_ids, *output]])[0].tolist()
        adjusted = penalised(logits, output, rules, witness.end_of_text)
        output.append(max(range(len(adjusted)), key=adjusted.__getitem__))
    return tuple(output)


def test_penalties_are_the_defined_ones_in_any_batch(
    witness: Witness, dflash: TestedServer, reference: Reference
) -> None:
    asked = [(prompt, rules) for prompt in reference.prompts[:NUM_PROMPTS] for rules in PENALTIES]
    expected = [answers_by_definition(witness, prompt, rules) for prompt, rules in asked]
    payloads = [greedy(prompt, NEW_TOKENS, ignore_eos=True, **rules) for prompt, rules in asked]
    # Unpenalised requests in the same batches keep their answers.
    free = [greedy(prompt, NEW_TOKENS) for prompt in reference.prompts]
    got = ask_all(dflash, [*payloads, *free], concurrency=24)
    assert [tuple(one["output_ids"]) for one in got[: len(asked)]] == expected
    assert [tuple(one["output_ids"]) for one in got[len(asked) :]] == [
        answer.output_ids[:NEW_TOKENS] for answer in reference.answers
    ]
    unpenalised = [
        one["output_ids"]
        for one in ask_all(
            dflash,
            [greedy(p, NEW_TOKENS, ignore_eos=True) for p in reference.prompts[:NUM_PROMPTS]],
        )
    ]
    changed = sum(
        answer != tuple(unpenalised[i // len(PENALTIES)]) for i, answer in enumerate(expected)
    )
    assert changed > len(asked) / 2  # else the penalties prove nothing
