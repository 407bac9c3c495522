"""SGLang's server flags as the checks at start read them, with DFLASH and the embedded pair."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dflash_sglang import zoo
from dflash_sglang.preflight.refused_flags import REFUSED, WITHOUT_EFFECT

VERIFIER, DRAFTER = str(zoo.path("moe").verifier), str(zoo.path("moe").drafter)


def server_flags(**changed: Any) -> SimpleNamespace:
    """SGLang's defaults on a CPU, with what a test changes."""
    neutral = {flag.field: flag.neutral for flag in REFUSED + WITHOUT_EFFECT}
    given = {
        "device": "cpu",
        "speculative_algorithm": "DFLASH",
        "model_path": VERIFIER,
        "revision": None,
        "load_format": "auto",
        "json_model_override_args": "{}",
        "tp_size": 1,
        "speculative_draft_model_path": DRAFTER,
        "speculative_draft_model_revision": None,
        "speculative_dflash_block_size": None,
        "speculative_num_draft_tokens": None,
        "speculative_draft_window_size": None,
        "quantization": None,
        "speculative_draft_kv_cache_dtype": None,
        "speculative_draft_load_format": None,
        "speculative_draft_model_quantization": None,
        "_speculative_draft_quantization_explicitly_set": None,
        "speculative_accept_threshold_single": 1.0,
        "speculative_accept_threshold_acc": 1.0,
        "speculative_use_rejection_sampling": False,
        "speculative_use_block_verification": False,
        "speculative_adaptive_config": None,
        "enable_deterministic_inference": False,
        "disable_decode_cuda_graph": False,
        "enable_lora": None,
        "lora_backend": "csgmv",
        "lora_paths": None,
        "enable_linear_replayssm_spec": False,
        "enable_unified_memory": False,
    }
    return SimpleNamespace(**{**neutral, **given, **changed})
