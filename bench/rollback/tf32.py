"""The arithmetic of SGLang's replay kernels on an NVIDIA GPU, emulated with torch on a CPU.

Two kernels of sglang/kernels/ops/attention/linear/gdn_replayssm_spec_decode.py multiply matrices:

- the verify, where the states are float32: keys by keys, keys by queries, state by keys and by
  queries, all in TF32 (`input_precision="tf32"`, accumulated in float32). The triangular system,
  the outputs and the updates are plain float32;
- the commit: keys by updates, each held as two bfloat16 parts whose products are exact.

A TF32 operand has 10 bits behind the leading one. Triton hands the tensor core the float32 as it
is (no `cvt` in the PTX: tests/kernels/compile/test_replay_products.py), and the tensor core ignores
the 13 bits that TF32 does not have: it truncates. Rounding to nearest is emulated beside it, for
a compiler that converts first.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from dflash_sglang.cpu.gated_delta.delta_rule import TokenBlock, Updates, apply_updates, run_block

_DROPPED = 13  # of float32's 23 bits, by TF32's 10
_KEPT = -1 << _DROPPED  # all bits but those


class Products(StrEnum):
    """What the operands of the verify's products are turned into."""

    FLOAT32 = "float32"  # nothing
    TRUNCATED = "truncated"  # TF32 as a tensor core reads a float32
    NEAREST = "nearest"  # TF32 as `cvt.rna.tf32` makes it: to nearest, ties away from zero


def tf32(x: Tensor, products: Products) -> Tensor:
    """A float32 tensor with the values that a product reads."""
    if products is Products.FLOAT32:
        return x
    bits = x.view(torch.int32)
    if products is Products.NEAREST:
        bits = bits + (1 << (_DROPPED - 1))
    return (bits & _KEPT).view(torch.float32)


def verify(state: Tensor, block: TokenBlock, products: Products) -> tuple[Tensor, Updates]:
    """Outputs and updates of a block, as `delta_rule.run_block`, from rounded operands.

    Args:
        state: [rows, heads, V, K] float32; not modified.
        block: the tokens, float32. Queries and keys enter products only.
        products: how the products read them.

    Returns:
        The outputs [rows, heads, tokens, V], and the updates, whose keys are not rounded: the
        kernel records them as they are.
    """
    read = block._replace(query=tf32(block.query, products), key=tf32(block.key, products))
    outputs, updates = run_block(tf32(state, products), read)
    return outputs, updates._replace(key=block.key)


def two_parts(x: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """What two parts of a short dtype hold of a float32."""
    high = x.to(dtype)
    return high.float() + (x - high.float()).to(dtype).float()


def commit(state: Tensor, updates: Updates, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The state after a block, from a record in two parts.

    Args:
        state: [rows, heads, V, K] float32; not modified.
        updates: of the committed tokens.
        dtype: of the parts, SGLang's for the convolutions' states.
    """
    total = updates.decay.cumsum(-1)
    last = total[..., -1:]
    weighted = two_parts(updates.update, dtype) * (last - total).exp().unsqueeze(-1)
    # The decays are in `weighted` already; what is left of them decays the old state.
    decayed = torch.zeros_like(updates.decay)
    recorded = Updates(two_parts(weighted, dtype), two_parts(updates.key, dtype), decayed)
    return apply_updates(state * last.exp().unsqueeze(-1), recorded)
