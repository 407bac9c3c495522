"""The rule of the mask token, which stands for a block position still to be drafted."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_sglang.json_values import as_int
from dflash_sglang.preflight.pair.head_family import setting
from dflash_sglang.preflight.pair.report import Finding, error, warning
from dflash_sglang.preflight.pair.rule import Pair

_DEFAULT_MASK_TOKEN = "<|MASK|>"  # SGLang's, where dflash_config has no mask_token


def mask_token(pair: Pair) -> Iterator[Finding]:
    """The mask must be an id that no text contains and that stops no request."""
    facts, mask = pair.verifier, setting(pair.draft, "mask_token_id")
    number = as_int(mask)
    if number is None:
        yield error(
            "mask_missing",
            "config.json of the drafter has no usable mask_token_id, and SGLang would add a token "
            "to the tokenizer",
            f"mask_token_id {mask!r}",
            "Add dflash_config.mask_token_id as the head was trained.",
        )
        return
    if number < 0 or (facts.vocab_size is not None and number >= facts.vocab_size):
        yield error(
            "mask_range",
            "the mask token is outside the verifier's vocabulary, so it has no embedding",
            f"mask_token_id {number}, vocabulary of {facts.vocab_size}",
            "Use a drafter trained with an id inside the vocabulary.",
        )
        return
    if facts.tokens is not None and number in facts.tokens:
        yield error(
            "mask_ordinary",
            "the mask token is an ordinary token of the verifier's tokenizer: text that contains "
            "it would be drafted over",
            f"mask_token_id {number} is {facts.tokens[number]!r}",
            "Train the head with an unused id or an added special token.",
        )
    if number in facts.stop_ids:
        yield error(
            "mask_stop",
            "the mask token is one of the verifier's stop tokens",
            f"mask_token_id {number}, stop ids {sorted(facts.stop_ids)}",
            "Train the head with another mask token, or take the id out of eos_token_id.",
        )
    yield from _mask_name(pair, number)
    text = facts.added_tokens.get(number)
    if text and text in facts.chat_template:
        yield warning(
            "mask_in_template",
            "the mask token occurs in the verifier's chat template",
            f"mask_token_id {number} is {text!r}",
            "Check the id: a mask should be a token that no prompt contains.",
        )


def _mask_name(pair: Pair, number: int) -> Iterator[Finding]:
    """SGLang compares the id with the tokenizer's own idea of the mask token's name."""
    named = setting(pair.draft, "mask_token") or _DEFAULT_MASK_TOKEN
    known = {text: i for i, text in pair.verifier.added_tokens.items()}
    if known.get(str(named), number) != number:
        yield error(
            "mask_name",
            "the drafter's mask token has another id in the verifier's tokenizer, and SGLang "
            "refuses the conflict",
            f"mask_token {named!r} is {known[str(named)]} there, mask_token_id is {number}",
            "Set dflash_config.mask_token to the text of mask_token_id, or correct the id.",
        )
