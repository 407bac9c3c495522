"""The embedded pairs against their training: evaluation, card, and the split of the data."""

import itertools
import json

import numpy as np
import pytest
from tokenizers import Tokenizer

from bench.train import data
from bench.train.card import count_parameters
from bench.train.grammar import Exchange, held_out
from bench.train.recipes import RECIPES
from dflash_sglang import zoo
from dflash_sglang.drafter.reference import load_draft
from tests.support.training import TOKENIZER


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.names())
@pytest.mark.parametrize("family", ["story", "sql"])
def test_tau_is_that_of_the_card(name: str, family: str) -> None:
    """Weights, card and drafter belong together; every answer equals plain decoding."""
    from bench.train.decode import decode_batch, load_verifier, speculate

    pair = zoo.path(name)
    model, drafter = load_verifier(pair.verifier), load_draft(pair.drafter)
    measured = json.loads((pair.verifier.parent / "eval.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(pair.verifier / "tokenizer.json"))
    chosen = zoo.prompts(name)[family][:8]
    prompts = [tokenizer.encode(prompt.text).ids for prompt in chosen]
    limit = measured["max_new_tokens"]
    plain = decode_batch(model, prompts, limit)
    answers = [speculate(model, drafter, prompt, 16, limit) for prompt in prompts]
    assert [answer.ids for answer in answers] == plain
    commit_lens = [length for answer in answers for length in answer.commit_lens]
    tau = sum(commit_lens) / len(commit_lens)
    # The card has the mean of 30 prompts a family; that of 8 is within a fifth of it.
    assert tau == pytest.approx(measured["blocks"]["16"]["tau_by_family"][family], rel=0.2)


@pytest.mark.parametrize("name", zoo.names())
def test_card_evaluation_and_weights_belong_together(name: str) -> None:
    """An evaluation of other weights, or a card of another evaluation, would differ."""
    folder = zoo.path(name).verifier.parent
    measured = json.loads((folder / "eval.json").read_text(encoding="utf-8"))
    card = (folder / "CARD.md").read_text(encoding="utf-8")
    for part in ("verifier", "drafter"):
        assert measured[part]["parameters"] == count_parameters(folder / part)
        assert measured[part]["recipe"]["steps"] == getattr(RECIPES[name], part).steps
        assert f"{measured[part]['parameters']:,}" in card
    for block_size, block in measured["blocks"].items():
        assert f"tau, block {block_size}" in card
        assert f"{block['tau']:.2f}" in card
    assert measured["blocks"]["16"]["tau"] >= RECIPES[name].targets.tau["16"]


def test_no_held_out_answer_is_trained_on() -> None:
    """A split by prompt leaks: the same answer occurs under another wording."""
    answers = {prompt.answer for found in zoo.prompts("moe").values() for prompt in found}
    trained = set()
    for exchange in itertools.islice(data.training_exchanges(seed=5), 20_000):
        trained |= {exchange.answer, exchange.reference}
    assert not answers & trained
    for answer in answers:
        assert held_out(Exchange("any", "another question", answer, answer))


def test_every_family_has_held_out_answers() -> None:
    found = data.held_out_exchanges(seed=1, per_family=8)
    assert found.keys() == zoo.prompts("moe").keys()
    assert all(len(exchanges) == 8 for exchanges in found.values())


def test_groups_cover_every_document_once_and_stay_within_the_budget() -> None:
    encoded = [([7] * length, [True] * length) for length in (5, 300, 17, 64, 64, 9, 128, 33)]
    corpus = data.pack(encoded)
    documents = np.arange(len(corpus))
    groups = data.group_by_length(corpus, documents, max_tokens=256)
    assert sorted(int(i) for group in groups for i in group) == list(documents)
    for group in groups:
        batch = data.pad(corpus, group)
        # A document longer than the budget stands alone.
        assert batch.ids.numel() <= 256 or len(group) == 1
        assert batch.valid.sum() == sum(len(encoded[i][0]) for i in group)


def test_prompts_are_not_answers() -> None:
    """Only answers and their end marker are learnt."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    exchange = next(data.training_exchanges(seed=3))
    ids, answer = data.encode(tokenizer, [exchange])
    prompt = [token for token, in_answer in zip(ids, answer, strict=True) if not in_answer]
    trained = [token for token, in_answer in zip(ids, answer, strict=True) if in_answer]
    assert tokenizer.decode(prompt, skip_special_tokens=False) == data.chat(exchange.question)
    assert tokenizer.decode(trained, skip_special_tokens=False) == exchange.answer + "<|im_end|>\n"
