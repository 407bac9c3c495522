"""Configurations of published pairs, cut to the fields the check reads.

Drafters, as published or quoted:

* Qwen3.6-35B-A3B-DFlash, revision 42d3b34d: github.com/vllm-project/speculators/issues/761.
* Qwen3.6-27B-DFlash (sliding layers): github.com/Luce-Org/lucebox/pull/94.
* Qwen3.5-122B-A10B-DFlash (6 layers, 8 taps, window 4096): github.com/z-lab/dflash/issues/152.
* Qwen3 heads: the family of huggingface.co/z-lab/Qwen3-8B-DFlash-b16.
* DFlash2 and assistant heads: tests/fixtures of github.com/z-lab/dflash.

Verifiers: the config.json of the same names at huggingface.co/Qwen.
"""

from __future__ import annotations

from typing import Any

from tests.support.pair_builder import PairFiles, head_tensors, tokenizer

_QWEN3_ADDED = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}
_QWEN36_ADDED = {"<|endoftext|>": 248044, "<|im_start|>": 248045, "<|im_end|>": 248046}


def _head(**fields: Any) -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "dtype": "bfloat16",
        "head_dim": 128,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "model_type": "qwen3",
        "rms_norm_eps": 1e-6,
        "use_cache": True,
        **fields,
    }


def _pair(
    verifier: dict[str, Any], draft: dict[str, Any], added: dict[str, int], stops: list[int]
) -> PairFiles:
    text = verifier.get("text_config", verifier)
    table = (text["vocab_size"], text["hidden_size"])
    return PairFiles(
        verifier=verifier,
        draft=draft,
        tokenizer=tokenizer({"a": 0, "b": 1}, added),
        generation={"eos_token_id": stops},
        verifier_tensors={"model.embed_tokens.weight": table, "lm_head.weight": table},
        draft_tensors=head_tensors(draft),
    )


def _qwen36(text: dict[str, Any], architecture: str) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "text_config": {
            "dtype": "bfloat16",
            "eos_token_id": 248044,
            "full_attention_interval": 4,
            "head_dim": 256,
            "max_position_embeddings": 262144,
            "mtp_num_hidden_layers": 1,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
                "partial_rotary_factor": 0.25,
                "rope_theta": 10000000,
                "rope_type": "default",
            },
            "tie_word_embeddings": False,
            "vocab_size": 248320,
            **text,
        },
        "tie_word_embeddings": False,
    }


def qwen36_35b_a3b() -> PairFiles:
    """Full attention in all 8 layers, YaRN from 4096 by 64."""
    draft = _head(
        block_size=16,
        dflash_config={"mask_token_id": 248070, "target_layer_ids": [1, 10, 19, 28, 37]},
        hidden_size=2048,
        intermediate_size=6144,
        layer_types=["full_attention"] * 8,
        max_position_embeddings=262144,
        max_window_layers=8,
        num_attention_heads=32,
        num_hidden_layers=8,
        num_key_value_heads=4,
        num_target_layers=40,
        rope_scaling={
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 64.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "type": "yarn",
        },
        rope_theta=10000000,
        sliding_window=None,
        tie_word_embeddings=False,
        use_sliding_window=False,
        vocab_size=248320,
    )
    text = {"hidden_size": 2048, "num_hidden_layers": 40}
    verifier = _qwen36(text, "Qwen3_5MoeForConditionalGeneration")
    return _pair(verifier, draft, _QWEN36_ADDED, [248046, 248044])


def qwen36_27b() -> PairFiles:
    """Four sliding layers and a full one, window 2048."""
    draft = _head(
        block_size=16,
        dflash_config={"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
        hidden_size=5120,
        intermediate_size=17408,
        layer_types=["sliding_attention"] * 4 + ["full_attention"],
        max_position_embeddings=262144,
        max_window_layers=5,
        num_attention_heads=32,
        num_hidden_layers=5,
        num_key_value_heads=8,
        num_target_layers=64,
        rope_theta=10000000,
        sliding_window=2048,
        tie_word_embeddings=False,
        use_sliding_window=True,
        vocab_size=248320,
    )
    text = {"hidden_size": 5120, "num_hidden_layers": 64}
    verifier = _qwen36(text, "Qwen3_5ForConditionalGeneration")
    return _pair(verifier, draft, _QWEN36_ADDED, [248046, 248044])


def qwen35_122b_a10b() -> PairFiles:
    """Everything under dflash_config and rope_parameters; six layers, one tap more than layers."""
    draft = _head(
        dflash_config={
            "block_size": 16,
            "mask_token_id": 248077,
            "target_layer_ids": [1, 7, 14, 20, 26, 32, 39, 45],
        },
        hidden_size=3072,
        intermediate_size=9216,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
        max_position_embeddings=262144,
        num_attention_heads=32,
        num_hidden_layers=6,
        num_key_value_heads=8,
        num_target_layers=49,  # counts the prediction layer
        rope_parameters={"rope_type": "default", "rope_theta": 10000000},
        sliding_window=4096,
        tie_word_embeddings=False,
        use_sliding_window=True,
        vocab_size=248320,
    )
    text = {"hidden_size": 3072, "num_hidden_layers": 48}
    verifier = _qwen36(text, "Qwen3_5MoeForConditionalGeneration")
    return _pair(verifier, draft, _QWEN36_ADDED, [248046, 248044])


def _qwen3(architecture: str, **fields: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "rope_scaling": None,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
        **fields,
    }


def _qwen3_head(taps: list[int], **fields: Any) -> dict[str, Any]:
    return _head(
        block_size=16,
        dflash_config={"mask_token_id": 151669, "target_layer_ids": taps},
        num_key_value_heads=fields.pop("num_key_value_heads", 8),
        rope_scaling=None,
        sliding_window=None,
        use_sliding_window=False,
        vocab_size=151936,
        **fields,
    )


def qwen3_4b() -> PairFiles:
    """The verifier ties its embeddings, which its class supports; the drafter copies the flag."""
    draft = _qwen3_head(
        [1, 9, 17, 25, 33],
        hidden_size=2560,
        intermediate_size=9728,
        layer_types=["full_attention"] * 5,
        max_position_embeddings=40960,
        num_attention_heads=32,
        num_hidden_layers=5,
        num_target_layers=36,
        rope_theta=1000000,
        tie_word_embeddings=True,
    )
    verifier = _qwen3(
        "Qwen3ForCausalLM",
        hidden_size=2560,
        num_hidden_layers=36,
        max_position_embeddings=40960,
        rope_theta=1000000,
        tie_word_embeddings=True,
    )
    pair = _pair(verifier, draft, _QWEN3_ADDED, [151645, 151643])
    del pair.verifier_tensors["lm_head.weight"]
    return pair


def qwen3_8b() -> PairFiles:
    draft = _qwen3_head(
        [1, 9, 17, 25, 33],
        hidden_size=4096,
        intermediate_size=12288,
        layer_types=["full_attention"] * 5,
        max_position_embeddings=40960,
        num_attention_heads=32,
        num_hidden_layers=5,
        num_target_layers=36,
        rope_theta=1000000,
        tie_word_embeddings=False,
    )
    verifier = _qwen3(
        "Qwen3ForCausalLM",
        hidden_size=4096,
        num_hidden_layers=36,
        max_position_embeddings=40960,
        rope_theta=1000000,
        tie_word_embeddings=False,
    )
    return _pair(verifier, draft, _QWEN3_ADDED, [151645, 151643])


def qwen3_coder_30b_a3b() -> PairFiles:
    draft = _qwen3_head(
        [1, 12, 23, 34, 45],
        hidden_size=2048,
        intermediate_size=6144,
        layer_types=["full_attention"] * 8,
        max_position_embeddings=262144,
        num_attention_heads=32,
        num_hidden_layers=8,
        num_key_value_heads=4,
        num_target_layers=48,
        rope_theta=10000000,
        tie_word_embeddings=False,
    )
    verifier = _qwen3(
        "Qwen3MoeForCausalLM",
        hidden_size=2048,
        num_hidden_layers=48,
        max_position_embeddings=262144,
        rope_theta=10000000,
        tie_word_embeddings=False,
    )
    return _pair(verifier, draft, _QWEN3_ADDED, [151645, 151643])


PLAIN = (qwen36_35b_a3b, qwen36_27b, qwen35_122b_a10b, qwen3_4b, qwen3_8b, qwen3_coder_30b_a3b)


def dflash2() -> dict[str, Any]:
    """config.json of a DFlash2 drafter."""
    return {
        "architectures": ["DFlash2DraftModel"],
        "attention_bias": False,
        "dflash_config": {
            "block_size": 16,
            "conv_group_size": 16,
            "conv_kernel_size": 2,
            "final_logit_softcapping": 20.0,
            "mask_token_id": 201818,
            "output_multiplier": 0.19611613513818404,
            "selector_rank": 256,
            "selector_top_k": 16,
            "target_layer_ids": [1, 13, 25, 37, 49],
        },
        "dtype": "bfloat16",
        "head_dim": 128,
        "hidden_size": 6656,
        "intermediate_size": 19968,
        "is_causal": False,
        "layer_types": ["sliding_attention"] * 5,
        "max_position_embeddings": 131072,
        "model_type": "qwen3",
        "num_attention_heads": 32,
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "num_target_layers": 52,
        "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
        "sliding_window": 2048,
        "use_sliding_window": True,
        "vocab_size": 202048,
    }


def muse_assistant() -> dict[str, Any]:
    """config.json of a MuseGlimmer assistant: settings at the top level, no dflash_config."""
    return {
        "architectures": ["MuseGlimmerAssistantModel"],
        "block_size": 16,
        "head_dim": 128,
        "hidden_size": 6656,
        "mask_token_id": 201818,
        "model_type": "muse_glimmer_assistant",
        "num_attention_heads": 32,
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "target_layer_ids": [1, 13, 25, 37, 49],
    }
