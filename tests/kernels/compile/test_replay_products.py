"""How SGLang's replay verify multiplies on a GPU: its PTX, compiled here for four architectures."""

from __future__ import annotations

import re
from typing import Any

import pytest
import triton
from sglang.kernels.ops.attention.linear.gdn_replayssm_spec_decode import (
    gdn_replayssm_spec_circular_kernel as verify,
)
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench.memory.recurrent_state import BLOCK, LENGTH, QWEN36

HEADS, KEY_HEADS, DIM = QWEN36.heads, QWEN36.key_heads, QWEN36.key_dim
POINTERS = {
    **dict.fromkeys(("q", "k", "v", "a", "b", "o"), "*bf16"),
    **dict.fromkeys(("d_cache", "k_cache", "rawv_cache", "rawk_cache"), "*bf16"),
    **dict.fromkeys(("A_log", "dt_bias", "h0", "g_cache", "beta_cache"), "*fp32"),
    **dict.fromkeys(("query_start_loc", "ssm_state_indices", "write_pos", "cache_base"), "*i32"),
    "replay_indices": "*i64",
    "is_flush_flags": "*i8",
    "scale": "fp32",
}
# As `_launch_gdn_spec` sets them for Qwen3.6-35B-A3B, block 16.
CONSTANTS: dict[str, Any] = {
    **dict.fromkeys(("stride_q_t", "stride_k_t"), KEY_HEADS * DIM),
    **dict.fromkeys(("stride_v_t", "stride_o_t"), HEADS * DIM),
    **dict.fromkeys(("stride_a_t", "stride_b_t"), HEADS),
    **dict.fromkeys(("stride_qsl", "stride_indices", "stride_replay_indices"), 1),
    **dict.fromkeys(("stride_d_slot", "stride_rawv_slot"), HEADS * LENGTH * DIM),
    **dict.fromkeys(("stride_k_slot", "stride_rawk_slot"), KEY_HEADS * LENGTH * DIM),
    **dict.fromkeys(("stride_g_slot", "stride_beta_slot"), HEADS * LENGTH),
    "stride_state_slot": HEADS * DIM * DIM,
    **{"H": KEY_HEADS, "HV": HEADS, "K": DIM, "V": DIM, "BK": DIM, "BV": 64, "NK": 2, "BKT": 64},
    **{"BS": BLOCK, "BC": LENGTH, "MAX_CACHE_LEN": LENGTH, "SOFTPLUS_THRESHOLD": 20.0},
    **{"USE_QK_L2NORM_IN_KERNEL": True, "STATE_FP32": True, "STORE_EXACT_RAW": False},
    **{"STORE_D_RESIDUAL": True, "STORE_K_RESIDUAL": True, "IS_FLUSH": False},
    "NULL_BLOCK_ID": -1,
}
OPTIONS = {"num_warps": 1, "num_stages": 2}


def ptx(architecture: int, precision: str) -> str:
    constants = {**CONSTANTS, "DOT_PRECISION": precision}
    names = verify.arg_names
    signature = {name: POINTERS.get(name, "constexpr") for name in names}
    given = {(i,): constants[name] for i, name in enumerate(names) if name in constants}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*")
    }
    source = ASTSource(verify, signature, given, aligned)
    text: str = triton.compile(source, GPUTarget("cuda", architecture, 32), OPTIONS).asm["ptx"]
    return text


@pytest.mark.parametrize("architecture", [80, 90, 100, 120])
def test_a_tensor_core_gets_float32_that_nothing_has_rounded_to_tf32(architecture: int) -> None:
    """So it drops the low bits: what `bench.rollback.tf32` calls truncated."""
    text = ptx(architecture, "tf32")
    assert set(re.findall(r"mma\.\S+", text)) == {
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
    }
    assert not re.search(r"cvt\.\S*tf32", text)


def test_a_conversion_would_be_seen() -> None:
    assert re.search(r"cvt\.\S*tf32", ptx(90, "tf32x3"))
