"""SGLang's Triton kernels of a replay, in Triton's interpreter, against our torch forms of them.

`test_replay_kernels.py` starts this file: TRITON_INTERPRET must be set before triton is imported.
What they must agree on is the protocol of `host.recurrent`: folding at every commit, a ring that is
empty before every verify and a narrower width whenever the worker likes. No GPU is needed for
that; the interpreter multiplies in float32 and says nothing about TF32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from sglang.kernels.ops.attention.linear import gdn_replayssm_spec_decode as kernels
from torch import Tensor

from dflash_sglang.cpu.gated_delta import replay

LAYERS, KEY_HEADS, HEADS, K, V = 2, 2, 4, 32, 32
SLOTS, ROWS, BLOCK = 9, 6, 16
SLOT_OF = torch.tensor([4, 8, 1], dtype=torch.int32)  # of three requests
ROW_OF = torch.tensor([3, 0, 5])
TRACKED = torch.tensor([2, 3, -1])  # slots for the prefix cache; -1: gone
# Width of a verify, what each request commits, and the tokens whose states are kept aside.
STEPS = (
    (16, (16, 1, 7), (2, -1, 3)),
    (4, (1, 4, 2), (0, 3, -1)),
    (1, (1, 1, 1), (-1, 0, -1)),
    (16, (3, 16, 15), (-1, 15, 14)),
    (7, (7, 2, 5), (6, 1, -1)),
)


class Pools(NamedTuple):
    """States and record of all layers, with what only a ring of low precision has."""

    states: Tensor
    record: dict[str, Tensor]
    low_parts: dict[str, Tensor | None]


def make_pools(states: Tensor, dtype: torch.dtype) -> Pools:
    def zeros(heads: int, dim: int) -> Tensor:
        return torch.zeros(LAYERS, ROWS, heads, BLOCK, dim, dtype=dtype)

    exact = dtype == torch.float32
    return Pools(
        states.clone(),
        {
            "d_cache": zeros(HEADS, V),
            "k_cache": zeros(KEY_HEADS, K),
            "g_cache": torch.zeros(LAYERS, ROWS, HEADS, BLOCK),
        },
        {"d": None if exact else zeros(HEADS, V), "k": None if exact else zeros(KEY_HEADS, K)},
    )


@pytest.mark.parametrize("length", [BLOCK, 4 * BLOCK])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernels_and_torch_forms_commit_the_same_states(dtype: torch.dtype, length: int) -> None:
    """Five steps in a row, each at another width: catches a cursor that is left anywhere.

    float16 stands for bfloat16, which the interpreter cannot multiply: a record in two parts. A
    ring of four blocks would hold tokens back, if it were not told to fold.
    """
    random = torch.Generator().manual_seed(0)
    states = 0.3 * torch.randn(LAYERS, SLOTS, HEADS, V, K, generator=random)
    ours, theirs = make_pools(states, torch.float32), make_pools(states, dtype)
    theirs = _longer(theirs, length)
    weights = torch.randn(2, LAYERS, HEADS, generator=random)
    cursors = {
        "write_pos": torch.zeros(ROWS, dtype=torch.int32),
        "cache_base": torch.zeros(ROWS, dtype=torch.int32),
        "is_flush": torch.zeros(ROWS, dtype=torch.int8),
    }
    # Half-precision outputs; the record's two parts hold 22 bits.
    output_error = 1e-5 if dtype == torch.float32 else 2e-3
    for width, commits, tracked in STEPS:
        for layer in range(LAYERS):
            expected, got = _verify(random, ours, theirs, cursors, weights[:, layer], layer, width)
            assert float((got - expected).abs().max() / expected.abs().max()) < output_error
        _commit(ours, theirs, cursors, torch.tensor(commits, dtype=torch.int32), tracked)
        difference = (ours.states - theirs.states).abs().max() / ours.states.abs().max()
        assert float(difference) < 2e-5
        assert not cursors["write_pos"].any()
        assert not cursors["is_flush"].any()


def _longer(pools: Pools, length: int) -> Pools:
    """The same with a ring of another length."""

    def stretched(part: Tensor | None) -> Tensor | None:
        return None if part is None else part.repeat_interleave(length // BLOCK, dim=3)

    record = {name: stretched(part) for name, part in pools.record.items()}
    low = {name: stretched(part) for name, part in pools.low_parts.items()}
    return Pools(pools.states, record, low)  # type: ignore[arg-type]


def _verify(
    random: torch.Generator,
    ours: Pools,
    theirs: Pools,
    cursors: dict[str, Tensor],
    weights: Tensor,
    layer: int,
    width: int,
) -> tuple[Tensor, Tensor]:
    """Outputs of our form and of the kernel, [total, HEADS, V] float32."""
    total, dtype = len(SLOT_OF) * width, theirs.record["d_cache"].dtype
    shapes = {"q": (KEY_HEADS, K), "k": (KEY_HEADS, K), "v": (HEADS, V), "a": (HEADS,)}
    inputs: dict[str, Any] = {
        name: torch.randn(total, *shape, generator=random).to(dtype)
        for name, shape in {**shapes, "b": (HEADS,)}.items()
    }
    shared: dict[str, Any] = {
        "A_log": weights[0],
        "dt_bias": weights[1],
        "query_start_loc": torch.arange(0, total + 1, width, dtype=torch.int32),
        "ssm_state_indices": SLOT_OF,
        "replay_indices": ROW_OF,
    }
    outputs = torch.zeros(total, HEADS, V), torch.zeros(total, HEADS, V, dtype=dtype)
    record: dict[str, Any] = {name: part[layer] for name, part in ours.record.items()}
    replay.gdn_replayssm_spec_decode(
        **{name: part.float() for name, part in inputs.items()},
        checkpoint_state=ours.states[layer],
        **record,
        out=outputs[0],
        **shared,
    )
    low = {name: None if part is None else part[layer] for name, part in theirs.low_parts.items()}
    kernels.gdn_replayssm_spec_decode(
        **inputs,
        checkpoint_state=theirs.states[layer],
        **{name: part[layer] for name, part in theirs.record.items()},
        rawv_cache=low["d"],
        rawk_cache=low["k"],
        beta_cache=None,
        out=outputs[1],
        **shared,
        **cursors,
        max_cache_len=theirs.record["d_cache"].shape[-2],
        max_spec_len=width,
        null_block_id=-1,
        launch_mode="verify",
        dot_precision="ieee",
    )
    return outputs[0], outputs[1].float()


def _commit(
    ours: Pools,
    theirs: Pools,
    cursors: dict[str, Tensor],
    lengths: Tensor,
    tracked: tuple[int, ...],
) -> None:
    """As `host.recurrent` calls both functions."""
    shared: dict[str, Any] = {
        "state_batch_indices": SLOT_OF,
        "replay_indices": ROW_OF,
        "accept_lens": lengths,
        "mamba_track_indices": TRACKED,
        "mamba_steps_to_track": torch.tensor(tracked),
        "null_block_id": -1,
    }
    replay.commit_gdn_replayssm_circular(checkpoint_state=ours.states, **ours.record, **shared)
    kernels.commit_gdn_replayssm_spec(
        num_accepted=lengths,
        replay_indices=ROW_OF,
        max_cache_len=theirs.record["d_cache"].shape[-2],
        max_spec_len=BLOCK,
        fold_every_commit=True,
        null_block_id=-1,
        **cursors,
    )
    kernels.commit_gdn_replayssm_circular(
        checkpoint_state=theirs.states,
        **theirs.record,
        d_residual_cache=theirs.low_parts["d"],
        k_residual_cache=theirs.low_parts["k"],
        **shared,
        **cursors,
    )
