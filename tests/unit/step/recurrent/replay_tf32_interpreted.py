"""SGLang's replay kernels with TF32 products, in Triton's interpreter, against bench's emulation.

`test_replay_kernels.py` starts this file: TRITON_INTERPRET must be set before triton is imported.
The interpreter multiplies in float32; here the operands of every product for which the kernel asks
TF32 lose the bits that a tensor core does not read. float16 stands for bfloat16, which the
interpreter cannot multiply.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from sglang.kernels.ops.attention.linear import gdn_replayssm_spec_decode as kernels
from torch import Tensor
from triton._C.libtriton import ir
from triton.runtime import interpreter

from bench.rollback.tf32 import Products, commit, verify
from dflash_sglang.cpu.gated_delta.delta_rule import Updates
from dflash_sglang.cpu.gated_delta.kernel_args import equal_blocks

KEY_HEADS, HEADS, K, V, BLOCK = 1, 2, 64, 64, 16
REQUESTS, SLOTS, ROWS = 2, 4, 3
SLOT_OF, ROW_OF = torch.tensor([3, 1], dtype=torch.int32), torch.tensor([0, 2])
COMMITS = torch.tensor([16, 5], dtype=torch.int32)
PART = torch.float16


class Dots(NamedTuple):
    """How the kernels have multiplied."""

    rounded: list[tuple[int, ...]]  # shapes of left operands in TF32
    short: list[tuple[int, ...]]  # in 16 bits


@pytest.fixture
def dots(monkeypatch: pytest.MonkeyPatch) -> Dots:
    """Truncates the operands of TF32 products, and notes all products."""
    seen = Dots([], [])
    original = interpreter.InterpreterBuilder.create_dot

    def create_dot(builder: Any, a: Any, b: Any, d: Any, precision: Any, *rest: Any) -> Any:
        if a.data.dtype == np.float32:
            assert precision == ir.INPUT_PRECISION.TF32
            seen.rounded.append(a.data.shape)
            a, b = (interpreter.TensorHandle(_truncated(x.data), x.dtype) for x in (a, b))
        else:
            seen.short.append(a.data.shape)
        return original(builder, a, b, d, precision, *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    return seen


def _truncated(x: Any) -> Any:
    """Without the 13 lowest bits; not by the code under test."""
    return (np.ascontiguousarray(x).view(np.int32) & -8192).view(np.float32)


def test_the_emulation_multiplies_as_the_kernels(dots: Dots) -> None:
    random = torch.Generator().manual_seed(0)
    states = 0.3 * torch.randn(SLOTS, HEADS, V, K, generator=random)
    total = REQUESTS * BLOCK
    shapes = {"q": (KEY_HEADS, K), "k": (KEY_HEADS, K), "v": (HEADS, V), "a": (HEADS,)}
    inputs: dict[str, Any] = {
        name: torch.randn(total, *shape, generator=random).to(PART)
        for name, shape in {**shapes, "b": (HEADS,)}.items()
    }
    a_log, dt_bias = torch.randn(2, HEADS, generator=random)
    record = {
        "d_cache": torch.zeros(ROWS, HEADS, BLOCK, V, dtype=PART),
        "k_cache": torch.zeros(ROWS, KEY_HEADS, BLOCK, K, dtype=PART),
        "g_cache": torch.zeros(ROWS, HEADS, BLOCK),
    }
    low = [torch.zeros_like(record[name]) for name in ("d_cache", "k_cache")]
    cursors: dict[str, Any] = {
        "write_pos": torch.zeros(ROWS, dtype=torch.int32),
        "cache_base": torch.zeros(ROWS, dtype=torch.int32),
        "is_flush": torch.zeros(ROWS, dtype=torch.int8),
        "replay_indices": ROW_OF,
        "null_block_id": -1,
    }
    outputs = torch.zeros(total, HEADS, V)
    kernels.gdn_replayssm_spec_decode(
        **inputs,
        A_log=a_log,
        dt_bias=dt_bias,
        checkpoint_state=states,
        **record,
        rawv_cache=low[0],
        rawk_cache=low[1],
        beta_cache=None,
        out=outputs,
        query_start_loc=torch.arange(0, total + 1, BLOCK, dtype=torch.int32),
        ssm_state_indices=SLOT_OF,
        **cursors,
        max_cache_len=BLOCK,
        max_spec_len=BLOCK,
        launch_mode="verify",
        dot_precision="tf32",  # the default where the GPU has it
    )
    # In each of two tiles of K: keys, states and the ring's history (which is empty) by keys and by
    # queries. Then the history's updates by both.
    assert len(dots.rounded) == REQUESTS * HEADS * (2 * 6 + 2)
    assert not dots.short
    q, k, v, a, b = (inputs[name].float() for name in "qkvab")
    block = equal_blocks(q, k, v, a, b, a_log, dt_bias, None, REQUESTS)
    before = states[SLOT_OF.long()].clone()
    read, updates = verify(before, block, Products.TRUNCATED)
    expected = read.transpose(1, 2).reshape(total, HEADS, V)
    # Orders of summation in float32; truncation moves outputs a hundred times as far.
    assert _distance(outputs, expected) < 1e-5
    plain, _ = verify(before, block, Products.FLOAT32)
    assert _distance(outputs, plain.transpose(1, 2).reshape(total, HEADS, V)) > 2e-4

    dots.rounded.clear()
    pools = {"checkpoint_state": states, **record}
    kernels.commit_gdn_replayssm_spec(
        num_accepted=COMMITS,
        max_cache_len=BLOCK,
        max_spec_len=BLOCK,
        fold_every_commit=True,
        **cursors,
    )
    kernels.commit_gdn_replayssm_circular(
        **{name: pool.unsqueeze(0) for name, pool in pools.items()},
        d_residual_cache=low[0].unsqueeze(0),
        k_residual_cache=low[1].unsqueeze(0),
        state_batch_indices=SLOT_OF,
        accept_lens=COMMITS,
        **cursors,
    )
    assert not dots.rounded  # the commit multiplies pairs of 16-bit parts
    assert dots.short
    for request, length in enumerate(COMMITS.tolist()):
        one = slice(request, request + 1)
        part = Updates(*(x[one, :, :length] for x in updates))
        after = states[SLOT_OF[one].long()]
        assert _distance(after, commit(before[one], part, PART)) < 1e-6
        assert _distance(after, before[one]) > 1e-2


def _distance(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())
