"""The embedded pair as it is packaged, and the data split behind it."""

import itertools
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from dflash_sglang import zoo
from dflash_sglang.model.checkpoint import load_config, read_headers

BENCH = Path(__file__).resolve().parents[2] / "bench"
PAIR = zoo.path("moe")


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """bench/pair_data.py, which imports its neighbours by name."""
    monkeypatch.syspath_prepend(str(BENCH))
    import pair_data

    yield pair_data
    for name in [name for name in sys.modules if name.startswith("pair_")]:
        del sys.modules[name]


def test_unknown_pair_is_named() -> None:
    with pytest.raises(KeyError, match="no embedded pair 'dense'; there is moe"):
        zoo.path("dense")


def test_the_pair_is_small_enough_to_ship() -> None:
    files = [file for folder in PAIR for file in folder.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 16 * 2**20


def test_all_weights_are_bfloat16() -> None:
    for folder in PAIR:
        assert {info.dtype for info in read_headers(folder).values()} == {"BF16"}


def test_verifier_stores_its_head() -> None:
    """SGLang's Qwen3-MoE never ties: without the tensor it answers token 0 for ever."""
    config = json.loads((PAIR.verifier / "config.json").read_text(encoding="utf-8"))
    assert config["tie_word_embeddings"] is False
    assert config["rope_theta"] > 0
    assert config["num_experts"] > 1
    with safe_open(PAIR.verifier / "model.safetensors", "pt") as tensors:
        head = tensors.get_tensor("lm_head.weight")
        assert head.shape == (config["vocab_size"], config["hidden_size"])
        assert torch.equal(head, tensors.get_tensor("model.embed_tokens.weight"))
        norms = head.float().norm(dim=1)
    assert norms.min() > 0


def test_drafter_is_made_for_this_verifier() -> None:
    draft = load_config(PAIR.drafter)
    verifier = json.loads((PAIR.verifier / "config.json").read_text(encoding="utf-8"))
    assert draft.hidden_size == verifier["hidden_size"]
    assert draft.vocab_size == verifier["vocab_size"]
    assert draft.num_target_layers == verifier["num_hidden_layers"]
    assert draft.block_size == 16
    tokenizer = Tokenizer.from_file(str(PAIR.verifier / "tokenizer.json"))
    assert tokenizer.id_to_token(draft.mask_token_id) == "<|mask|>"


def test_prompts_cover_nine_families_without_repeats() -> None:
    prompts = zoo.prompts("moe")
    assert len(prompts) == 9
    questions = [prompt.question for found in prompts.values() for prompt in found]
    assert len(questions) >= 400
    assert len(set(questions)) == len(questions)
    assert all(prompt.answer for found in prompts.values() for prompt in found)


def test_prompt_text_is_what_the_chat_template_writes() -> None:
    tokenizer = AutoTokenizer.from_pretrained(PAIR.verifier)
    for found in zoo.prompts("moe").values():
        message = [{"role": "user", "content": found[0].question}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        assert found[0].text == text
        # One digit a token, and no token joins the special ones.
        ids = tokenizer(found[0].text)["input_ids"]
        assert tokenizer.decode(ids) == found[0].text


def test_no_held_out_answer_is_trained_on(data: ModuleType) -> None:
    """A split by prompt leaks: the same answer occurs under another wording."""
    grammar = sys.modules["pair_grammar"]
    held_out = {prompt.answer for found in zoo.prompts("moe").values() for prompt in found}
    trained = set()
    for exchange in itertools.islice(data.training_exchanges(seed=5), 20_000):
        trained |= {exchange.answer, exchange.reference}
    assert not held_out & trained
    for answer in held_out:
        assert grammar.held_out(grammar.Exchange("any", "asked otherwise", answer, answer))


def test_every_family_has_held_out_answers(data: ModuleType) -> None:
    held_out = data.held_out_exchanges(seed=1, per_family=8)
    assert held_out.keys() == zoo.prompts("moe").keys()
    assert all(len(found) == 8 for found in held_out.values())


def test_groups_cover_every_document_once_and_stay_within_the_budget(data: ModuleType) -> None:
    encoded = [([7] * length, [True] * length) for length in (5, 300, 17, 64, 64, 9, 128, 33)]
    corpus = data.pack(encoded)
    documents = data.np.arange(len(corpus))
    groups = data.group_by_length(corpus, documents, max_tokens=256)
    assert sorted(int(i) for group in groups for i in group) == list(documents)
    for group in groups:
        batch = data.pad(corpus, group)
        # A document longer than the budget stands alone.
        assert batch.ids.numel() <= 256 or len(group) == 1
        assert batch.valid.sum() == sum(len(encoded[i][0]) for i in group)


def test_prompts_are_not_answers(data: ModuleType) -> None:
    """Only answers and their end marker are learnt."""
    tokenizer = Tokenizer.from_file(str(PAIR.verifier / "tokenizer.json"))
    exchange = next(data.training_exchanges(seed=3))
    ids, answer = data.encode(tokenizer, [exchange])
    asked = [i for i, told in zip(ids, answer, strict=True) if not told]
    told = [i for i, told in zip(ids, answer, strict=True) if told]
    assert tokenizer.decode(asked, skip_special_tokens=False) == data.chat(exchange.question)
    assert tokenizer.decode(told, skip_special_tokens=False) == exchange.answer + "<|im_end|>\n"
