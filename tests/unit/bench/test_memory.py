"""The bytes of states and of their rollback, against SGLang's pool of one layer of real size."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.configs.mamba_utils import (
    Mamba2CacheParams,
    Mamba2StateDType,
)
from sglang.srt.mem_cache.memory_pool import MambaPool
from torch import Tensor

from bench.memory.recurrent_state import BLOCK, H200, LENGTH, QWEN36
from dflash_sglang.preflight.rollback import record_length
from tests.support.state_shape import qwen36_state_shape

STATES, REQUESTS = 2, 1  # the pool has one more of each, for padding


def pool_of_one_layer(*, replay: bool) -> MambaPool:
    shape = qwen36_state_shape()
    dtype = Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)
    return MambaPool(
        size=STATES,
        spec_state_size=REQUESTS,
        cache_params=Mamba2CacheParams(shape=shape, layers=[0], dtype=dtype),
        mamba_layer_ids=[0],
        device="cpu",
        speculative_num_draft_tokens=BLOCK,
        linear_replayssm_cache_len=LENGTH,
        enable_linear_replayssm_spec=replay,
    )


def size(*tensors: Tensor | None) -> int:
    """Bytes of memory under some tensors."""
    given = [tensor for tensor in tensors if tensor is not None]
    return sum(tensor.untyped_storage().nbytes() for tensor in given)


@pytest.mark.parametrize("replay", [False, True], ids=["snapshot", "replay"])
def test_the_pool_takes_what_the_calculator_says(replay: bool) -> None:
    pool, one = pool_of_one_layer(replay=replay), QWEN36._replace(num_layers=1)
    cache = pool.mamba_cache
    assert isinstance(cache, MambaPool.SpeculativeState)
    assert size(cache.temporal, *cache.conv) == (STATES + 1) * one.state()
    kept = size(
        cache.intermediate_ssm,
        cache.replayssm_d,
        cache.replayssm_k,
        cache.replayssm_g,
        cache.replayssm_rawv,
        cache.replayssm_rawk,
        *cache.intermediate_conv_window,
    )
    slot = one.record(BLOCK, LENGTH) if replay else one.snapshots(BLOCK)
    assert kept == (REQUESTS + 1) * slot


def test_replay_takes_a_tenth_of_snapshots_at_most() -> None:
    assert record_length(BLOCK) == LENGTH
    record, snapshots = QWEN36.record(BLOCK, LENGTH), QWEN36.snapshots(BLOCK)
    assert record < 0.1 * snapshots
    assert H200.requests(QWEN36, record) > 2 * H200.requests(QWEN36, snapshots)
