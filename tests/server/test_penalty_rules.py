"""Penalties by their definition: the rules, one token at a time, over raw logits by transformers.

SGLang's plain server applies several penalties at once in the order of a Python set, so it
is no reference for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bench.harness.requests import greedy, send_all
from bench.harness.servers import TestedServer
from bench.harness.verifier_distribution import ReferenceModel
from tests.support.reference import Reference

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
    model: ReferenceModel, prompt: str, penalties: Sequence[Mapping[str, Any]]
) -> list[tuple[int, ...]]:
    """An answer under each of the penalties."""
    prompt_ids = model.tokenizer(prompt)["input_ids"]
    outputs: list[list[int]] = [[] for _ in penalties]
    for _ in range(NEW_TOKENS):
        logits = model.logits([[*prompt_ids, *output] for output in outputs]).tolist()
        for row, output, rules in zip(logits, outputs, penalties, strict=True):
            adjusted = penalised(row, output, rules, model.end_of_text)
            output.append(max(range(len(adjusted)), key=adjusted.__getitem__))
    return [tuple(output) for output in outputs]


def test_penalties_are_the_defined_ones_in_any_batch(
    model: ReferenceModel, dflash: TestedServer, reference: Reference
) -> None:
    prompts = reference.prompts[:NUM_PROMPTS]
    expected = [
        answer for prompt in prompts for answer in answers_by_definition(model, prompt, PENALTIES)
    ]
    payloads = [
        greedy(prompt, NEW_TOKENS, ignore_eos=True, **rules)
        for prompt in prompts
        for rules in PENALTIES
    ]
    # Unpenalised requests in the same batches keep their answers.
    free = [greedy(prompt, NEW_TOKENS) for prompt in reference.prompts]
    got = send_all(dflash, [*payloads, *free], concurrency=24)
    assert [tuple(one["output_ids"]) for one in got[: len(expected)]] == expected
    assert [tuple(one["output_ids"]) for one in got[len(expected) :]] == [
        answer.output_ids[:NEW_TOKENS] for answer in reference.answers
    ]
    unpenalised = [
        one["output_ids"]
        for one in send_all(
            dflash,
            [greedy(p, NEW_TOKENS, ignore_eos=True) for p in reference.prompts[:NUM_PROMPTS]],
        )
    ]
    changed = sum(
        answer != tuple(unpenalised[i // len(PENALTIES)]) for i, answer in enumerate(expected)
    )
    assert changed > len(expected) / 2  # else the penalties prove nothing
