"""The embedded pairs as they are packaged, and the data split behind them."""

import itertools
import json
import sys
from types import ModuleType

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_sglang import zoo
from dflash_sglang.drafter.checkpoint import load_config, read_headers
from dflash_sglang.drafter.reference import load_draft
from tests.support.training import TOKENIZER

NAMES = ("hybrid", "moe")


@pytest.fixture(params=NAMES)
def pair(request: pytest.FixtureRequest) -> zoo.Pair:
    """Each embedded pair in turn."""
    return zoo.path(request.param)


@pytest.fixture
def data() -> ModuleType:
    """The module bench/train/data.py."""
    from bench.train import data

    return data


def test_the_pairs_are_found_by_name() -> None:
    assert zoo.names() == NAMES


def test_unknown_pair_is_named() -> None:
    with pytest.raises(KeyError, match="no embedded pair 'dense'; available: hybrid, moe"):
        zoo.path("dense")


def test_the_pair_is_small_enough_to_ship(pair: zoo.Pair) -> None:
    files = [file for folder in pair for file in folder.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 16 * 2**20


def test_all_weights_are_bfloat16(pair: zoo.Pair) -> None:
    for folder in pair:
        assert {info.dtype for info in read_headers(folder).values()} == {"BF16"}


def test_verifier_stores_its_head(pair: zoo.Pair) -> None:
    """SGLang's Qwen3-MoE never ties: without the tensor it answers token 0 for ever."""
    config = json.loads((pair.verifier / "config.json").read_text(encoding="utf-8"))
    assert config["tie_word_embeddings"] is False
    assert config["rope_theta"] > 0
    assert config["num_experts"] > 1
    with safe_open(pair.verifier / "model.safetensors", "pt") as tensors:
        head = tensors.get_tensor("lm_head.weight")
        assert head.shape == (config["vocab_size"], config["hidden_size"])
        assert torch.equal(head, tensors.get_tensor("model.embed_tokens.weight"))
        norms = head.float().norm(dim=1)
    assert norms.min() > 0


def test_verifier_loads_strictly(pair: zoo.Pair) -> None:
    """A name that transformers does not know would leave random weights with only a warning."""
    _, info = AutoModelForCausalLM.from_pretrained(pair.verifier, output_loading_info=True)
    assert not any(info.values()), info


def test_sglang_reads_the_hybrid_as_three_delta_nets_and_an_attention() -> None:
    """It derives the layers from `full_attention_interval`, which transformers drops on saving."""
    from sglang.srt.utils.hf_transformers_utils import get_config

    config = get_config(str(zoo.path("hybrid").verifier), trust_remote_code=False)
    assert config.linear_layer_ids == [0, 1, 2]
    assert config.full_attention_layer_ids == [3]
    written = json.loads((zoo.path("hybrid").verifier / "config.json").read_text(encoding="utf-8"))
    assert {key: getattr(config, key) for key in written if key.startswith("linear_")} == {
        key: value for key, value in written.items() if key.startswith("linear_")
    }


def test_drafter_is_made_for_this_verifier(pair: zoo.Pair) -> None:
    draft = load_config(pair.drafter)
    verifier = json.loads((pair.verifier / "config.json").read_text(encoding="utf-8"))
    assert draft.hidden_size == verifier["hidden_size"]
    assert draft.vocab_size == verifier["vocab_size"]
    assert draft.num_target_layers == verifier["num_hidden_layers"]
    assert draft.block_size == 16
    tokenizer = Tokenizer.from_file(str(pair.verifier / "tokenizer.json"))
    assert tokenizer.id_to_token(draft.mask_token_id) == "<|mask|>"


def test_the_pairs_share_tokenizer_and_prompts() -> None:
    """One data stage: what is measured on one pair can be asked of the other."""
    moe, hybrid = (zoo.path(name).verifier / "tokenizer.json" for name in ("moe", "hybrid"))
    assert moe.read_bytes() == hybrid.read_bytes()
    assert zoo.prompts("moe") == zoo.prompts("hybrid")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["story", "sql"])
def test_tau_is_that_of_the_card(pair: zoo.Pair, family: str) -> None:
    """Weights, card and drafter belong together; every answer equals plain decoding."""
    from bench.train.decode import decode_batch, load_verifier, speculate

    model, drafter = load_verifier(pair.verifier), load_draft(pair.drafter)
    measured = json.loads((pair.verifier.parent / "eval.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(pair.verifier / "tokenizer.json"))
    asked = zoo.prompts(pair.verifier.parent.name)[family][:8]
    prompts = [tokenizer.encode(prompt.text).ids for prompt in asked]
    limit = measured["max_new_tokens"]
    plain = decode_batch(model, prompts, limit)
    told = [speculate(model, drafter, prompt, 16, limit) for prompt in prompts]
    assert [answer.ids for answer in told] == plain
    commit_lens = [length for answer in told for length in answer.commit_lens]
    tau = sum(commit_lens) / len(commit_lens)
    # The card asks 30 prompts a family; 8 of them are a fifth apart at most.
    assert tau == pytest.approx(measured["blocks"]["16"]["tau_by_family"][family], rel=0.2)


@pytest.mark.parametrize("name", NAMES)
def test_card_evaluation_and_weights_belong_together(name: str) -> None:
    """An evaluation of other weights, or a card of another evaluation, would differ."""
    from bench.train.card import count_parameters
    from bench.train.recipes import RECIPES

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


def test_prompts_cover_nine_families_without_repeats() -> None:
    prompts = zoo.prompts("moe")
    assert len(prompts) == 9
    questions = [prompt.question for found in prompts.values() for prompt in found]
    assert len(questions) >= 400
    assert len(set(questions)) == len(questions)
    assert all(prompt.answer for found in prompts.values() for prompt in found)


def test_prompt_text_is_what_the_chat_template_writes(pair: zoo.Pair) -> None:
    tokenizer = AutoTokenizer.from_pretrained(pair.verifier)
    for found in zoo.prompts(pair.verifier.parent.name).values():
        message = [{"role": "user", "content": found[0].question}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        assert found[0].text == text
        # One digit a token, and no token joins the special ones.
        ids = tokenizer(found[0].text)["input_ids"]
        assert tokenizer.decode(ids) == found[0].text


def test_no_held_out_answer_is_trained_on(data: ModuleType) -> None:
    """A split by prompt leaks: the same answer occurs under another wording."""
    grammar = sys.modules["bench.train.grammar"]
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
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    exchange = next(data.training_exchanges(seed=3))
    ids, answer = data.encode(tokenizer, [exchange])
    asked = [i for i, told in zip(ids, answer, strict=True) if not told]
    told = [i for i, told in zip(ids, answer, strict=True) if told]
    assert tokenizer.decode(asked, skip_special_tokens=False) == data.chat(exchange.question)
    assert tokenizer.decode(told, skip_special_tokens=False) == exchange.answer + "<|im_end|>\n"
