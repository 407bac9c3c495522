"""The embedded pairs as they are packaged."""

import json

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_sglang import zoo
from dflash_sglang.drafter.checkpoint import load_config, read_headers

NAMES = ("hybrid", "moe")


@pytest.fixture(params=NAMES)
def pair(request: pytest.FixtureRequest) -> zoo.Pair:
    """Each embedded pair in turn."""
    return zoo.path(request.param)


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
