"""Options of SGLang's kernels that the replacements do not implement are refused, never ignored."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_sglang.cpu.gated_delta import conv_kernels, elementwise, rule_kernels
from dflash_sglang.errors import PlatformError

X = torch.zeros(1, 1, 1)
SLOTS = torch.zeros(1, dtype=torch.int32)
RULE = {
    "initial_state": X,
    "initial_state_indices": SLOTS,
    "cu_seqlens": SLOTS,
    "use_qk_l2norm_in_kernel": True,
}
VERIFY = {"cu_seqlens": SLOTS, "use_qk_l2norm_in_kernel": True, "disable_state_update": True}
DECODE = {"use_qk_l2norm_in_kernel": False}
NORM = {"norm_before_gate": True, "group_size": None, "activation": "swish"}


def prefill_conv(**options: Any) -> object:
    return conv_kernels.causal_conv1d_fn(
        X, X, None, X, SLOTS, cache_indices=SLOTS, has_initial_state=SLOTS, **options
    )


def update_conv(**options: Any) -> object:
    return conv_kernels.causal_conv1d_update(X, X, X, conv_state_indices=SLOTS, **options)


def store_separate_windows() -> None:
    conv_kernels.store_windows(torch.zeros(1, 2, 3, 4), SLOTS, X)


def gating(**options: Any) -> object:
    return rule_kernels.fused_gdn_gating(X, X, X, X, **options)


def chunks(**options: Any) -> object:
    return rule_kernels.chunk_gated_delta_rule(X, X, X, X, X, **{**RULE, **options})


def decode(**options: Any) -> object:
    return rule_kernels.fused_recurrent_gated_delta_rule_packed_decode(
        X, X, X, X, X, 1.0, X, X, SLOTS, **{**DECODE, **options}
    )


def verify(**options: Any) -> object:
    return rule_kernels.fused_sigmoid_gating_delta_rule_update(
        X, X, X, 1.0, 20.0, X, X, X, X, X, SLOTS, **{**VERIFY, **options}
    )


def norm(**options: Any) -> object:
    return elementwise.gated_norm(SimpleNamespace(**{**NORM, **options}), X, X)


def sigmoid_mul(**options: Any) -> object:
    return elementwise.fused_sigmoid_mul(X, X, **options)


@pytest.mark.parametrize(
    ("call", "options", "supported"),
    [
        (prefill_conv, {"activation": None}, "activation='silu'"),
        (update_conv, {"activation": "gelu"}, "activation='silu'"),
        (store_separate_windows, {}, "overlapping"),
        (gating, {"threshold": 10.0}, "threshold 20"),
        (chunks, {"use_qk_l2norm_in_kernel": False}, "use_qk_l2norm_in_kernel"),
        (chunks, {"head_first": True}, "head_first"),
        (decode, {}, "use_qk_l2norm_in_kernel"),
        (verify, {"use_qk_l2norm_in_kernel": False}, "use_qk_l2norm_in_kernel"),
        (verify, {"is_kda": True}, "is_kda"),
        (verify, {"disable_state_update": False}, "verify"),
        (verify, {}, "intermediate_states_buffer"),
        (norm, {"norm_before_gate": False}, "norm_before_gate"),
        (norm, {"group_size": 8}, "group_size"),
        (norm, {"activation": "sigmoid"}, "swish"),
        (sigmoid_mul, {"quant": True}, "quant"),
    ],
)
def test_unsupported_options_are_refused(
    call: Callable[..., object], options: dict[str, Any], supported: str
) -> None:
    with pytest.raises(PlatformError, match=supported):
        call(**options)
