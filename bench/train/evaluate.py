"""Measure a packed pair on held-out prompts: exact answers, tau, identity with plain decoding."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer

from bench.train import decode
from bench.train.data import chat
from bench.train.grammar import Exchange
from dflash_sglang.drafter.reference import DraftModel, load_draft

MAX_NEW_TOKENS = 320


class Case(NamedTuple):
    """A held-out exchange and its plain greedy answer."""

    exchange: Exchange
    prompt: list[int]
    plain: list[int]


def evaluate(
    verifier_dir: Path,
    drafter_dir: Path,
    held_out: dict[str, list[Exchange]],
    blocks: tuple[int, ...],
    speculated: int,
) -> dict[str, Any]:
    """Run the float32 arithmetic on the packed bfloat16 weights.

    Args:
        verifier_dir: packed verifier checkpoint.
        drafter_dir: packed drafter checkpoint.
        held_out: exchanges by family; plain decoding answers all.
        blocks: block sizes to speculate with.
        speculated: prompts of each family that are also answered speculatively.

    Returns:
        Rates of exact answers by family, and for each block tau over all prompts and by family with
        the share of steps that accepted each draft.

    Raises:
        RuntimeError: a speculative answer differs from the plain one.
    """
    model, drafter = decode.load_verifier(verifier_dir), load_draft(drafter_dir)
    tokenizer = Tokenizer.from_file(str(verifier_dir / "tokenizer.json"))
    cases = _plain_answers(model, tokenizer, held_out)
    result: dict[str, Any] = {
        "max_new_tokens": MAX_NEW_TOKENS,
        "exact": {family: _exact_share(tokenizer, found) for family, found in cases.items()},
        "prompts": {family: len(found) for family, found in cases.items()},
        "speculated_prompts_per_family": speculated,
        "blocks": {},
    }
    chosen = {family: found[:speculated] for family, found in cases.items()}
    for block_size in blocks:
        result["blocks"][str(block_size)] = _speculate(model, drafter, chosen, block_size)
        print(block_size, result["blocks"][str(block_size)], flush=True)
    return result


def wrong_answers(tokenizer: Tokenizer, cases: list[Case]) -> Iterator[tuple[str, str, str]]:
    """(question, reference, answer) wherever the greedy answer is not the reference."""
    for case in cases:
        answer = _text(tokenizer, case.plain)
        if answer != case.exchange.reference:
            yield case.exchange.question, case.exchange.reference, answer


def _plain_answers(
    model: Any, tokenizer: Tokenizer, held_out: dict[str, list[Exchange]]
) -> dict[str, list[Case]]:
    cases = {}
    for family, found in held_out.items():
        prompts = [tokenizer.encode(chat(exchange.question)).ids for exchange in found]
        answers = decode.decode_batch(model, prompts, MAX_NEW_TOKENS)
        cases[family] = [Case(*case) for case in zip(found, prompts, answers, strict=True)]
    return cases


def _exact_share(tokenizer: Tokenizer, cases: list[Case]) -> float:
    wrong = list(wrong_answers(tokenizer, cases))
    for question, reference, answer in wrong[:2]:
        print(f"wrong: {question}\n  want {reference!r}\n  got  {answer!r}", flush=True)
    return round(1 - len(wrong) / len(cases), 4)


def _text(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True).strip()


def _speculate(
    model: Any, drafter: DraftModel, cases: dict[str, list[Case]], block_size: int
) -> dict[str, Any]:
    committed = dict.fromkeys(cases, 0)
    steps = dict.fromkeys(cases, 0)
    accepted = torch.zeros(block_size, dtype=torch.int64)  # [k]: steps that accepted k drafts
    for family, found in cases.items():
        for case in found:
            answer = decode.speculate(model, drafter, case.prompt, block_size, MAX_NEW_TOKENS)
            if answer.ids != case.plain:
                raise RuntimeError(
                    f"block {block_size} changed the answer to {case.exchange.question!r}"
                )
            committed[family] += sum(answer.commit_lens)
            steps[family] += len(answer.commit_lens)
            accepted += torch.bincount(torch.tensor(answer.accept_lens), minlength=block_size)
    shares = accepted.flip(0).cumsum(0).flip(0)[1:] / accepted.sum()  # P(at least k accepted)
    return {
        "tau": round(sum(committed.values()) / sum(steps.values()), 3),
        "tau_by_family": {family: round(committed[family] / steps[family], 3) for family in cases},
        "slot_accepted": [round(float(share), 3) for share in shares],
        "identical_answers": sum(len(found) for found in cases.values()),
    }
