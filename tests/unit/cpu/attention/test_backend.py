"""SGLang's attention interface: modes, pools, what it refuses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor, nn

from dflash_sglang.cpu.attention.backend import CpuAttentionBackend, refuse_unsupported_attention
from dflash_sglang.cpu.attention.kv_pool import CpuKVPool
from dflash_sglang.cpu.builtin_worker import StreamlessTensor
from dflash_sglang.errors import PlatformError
from tests.unit.cpu.attention.batches import Batch, attend_by_definition, make_batch

HEADS, KV_HEADS, DIM, WIDTH = 4, 2, 16, 3
LAYERS = 2


def make_pool(v_head_dim: int = DIM, dtype: torch.dtype = torch.float32) -> CpuKVPool:
    return CpuKVPool(
        size=200,
        page_size=1,
        dtype=dtype,
        head_num=KV_HEADS,
        head_dim=DIM,
        v_head_dim=v_head_dim,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
        enable_kv_cache_copy=True,
    )


@pytest.fixture
def pool() -> CpuKVPool:
    return make_pool()


def layer(
    window_left: int = -1, attn_type: AttentionType = AttentionType.DECODER
) -> RadixAttention:
    return RadixAttention(
        HEADS, DIM, 0.25, KV_HEADS, 1, sliding_window_size=window_left, attn_type=attn_type
    )


def served(pool: CpuKVPool, batch: Batch, mode: ForwardMode, attention: RadixAttention) -> Tensor:
    """Run a batch whose newest tokens are not in the pool yet."""
    runner = SimpleNamespace(
        token_to_kv_pool=pool,
        req_to_token_pool=SimpleNamespace(req_to_token=batch.req_to_token),
    )
    backend = CpuAttentionBackend(runner)
    slots = [
        batch.req_to_token[row, kv_len - q_len : kv_len].long()
        for row, q_len, kv_len in zip(batch.rows, batch.q_lens, batch.kv_lens, strict=True)
    ]
    new = torch.cat(slots)
    pool.kv_pair(1)[:, : batch.kv.shape[1]] = batch.kv
    pool.kv_pair(1)[:, new] = float("nan")
    excluded = WIDTH if mode.is_target_verify() else 0  # SGLang's seq_lens leave the block out
    forward_batch = SimpleNamespace(
        forward_mode=mode,
        batch_size=len(batch.rows),
        seq_lens=torch.tensor(batch.kv_lens) - excluded,
        extend_seq_lens=torch.tensor(batch.q_lens),
        req_pool_indices=batch.rows,
        spec_info=SimpleNamespace(draft_token_num=WIDTH),
        out_cache_loc=new,
    )
    backend.init_forward_metadata(forward_batch)
    key, value = batch.kv[:, new]
    out: Tensor = backend.forward(batch.query.flatten(1), key, value, attention, forward_batch)
    return out


@pytest.mark.parametrize("window_left", [-1, 4])
@pytest.mark.parametrize(
    ("mode", "q_lens", "attn_type"),
    [
        (ForwardMode.DECODE, [1, 1, 1], AttentionType.DECODER),
        (ForwardMode.EXTEND, [5, 2, 9], AttentionType.DECODER),
        (ForwardMode.TARGET_VERIFY, [WIDTH] * 3, AttentionType.DECODER),
        (ForwardMode.TARGET_VERIFY, [WIDTH] * 3, AttentionType.ENCODER_ONLY),
    ],
)
def test_each_mode_writes_the_new_tokens_and_attends(
    pool: CpuKVPool,
    mode: ForwardMode,
    q_lens: list[int],
    attn_type: AttentionType,
    window_left: int,
) -> None:
    batch = make_batch(q_lens, [7, 22, 9])
    out = served(pool, batch, mode, layer(window_left, attn_type))
    causal = attn_type is AttentionType.DECODER
    expected = attend_by_definition(batch, 0.25, causal, window_left)
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=1e-4)
    assert pool.kv_pair(0).count_nonzero() == 0  # the other layer is untouched


def test_idle_batch(pool: CpuKVPool) -> None:
    batch = make_batch([], [])._replace(req_to_token=torch.zeros(1, 4, dtype=torch.int32))
    runner = SimpleNamespace(
        token_to_kv_pool=pool,
        req_to_token_pool=SimpleNamespace(req_to_token=batch.req_to_token),
    )
    backend = CpuAttentionBackend(runner)
    idle = SimpleNamespace(forward_mode=ForwardMode.IDLE, batch_size=0)
    backend.init_forward_metadata(idle)
    empty = torch.empty(0, KV_HEADS, DIM)
    assert backend.forward(torch.empty(0, HEADS * DIM), empty, empty, layer(), idle).shape == (
        0,
        HEADS * DIM,
    )


def test_pool_buffers_are_views_of_the_pair(pool: CpuKVPool) -> None:
    """SGLang reads and moves slots through its own names for them."""
    key, value = torch.randn(2, 3, KV_HEADS, DIM)
    slots = torch.tensor([5, 2, 9])
    pool.set_kv_buffer(SimpleNamespace(layer_id=1), slots, key, value)
    assert torch.equal(pool.get_key_buffer(1)[slots], key)
    assert torch.equal(pool.get_value_buffer(1)[slots], value)
    assert torch.equal(pool.kv_pair(1)[0][slots], key)
    pool.move_kv_cache(torch.tensor([7]), torch.tensor([2]))
    assert torch.equal(pool.kv_pair(1)[:, 7], pool.kv_pair(1)[:, 2])


def test_value_heads_of_another_width_are_refused() -> None:
    with pytest.raises(PlatformError, match="one shape"):
        make_pool(v_head_dim=DIM // 2)


def test_another_pool_is_refused() -> None:
    with pytest.raises(PlatformError, match="disable-hybrid-swa-memory"):
        CpuAttentionBackend(SimpleNamespace(token_to_kv_pool=object(), req_to_token_pool=None))


def test_what_attention_would_ignore_is_refused(pool: CpuKVPool) -> None:
    backend = CpuAttentionBackend(SimpleNamespace(token_to_kv_pool=pool, req_to_token_pool=None))
    nothing = torch.empty(0)
    with pytest.raises(PlatformError, match="sinks"):
        backend.forward_extend(nothing, None, None, layer(), None, sinks=nothing)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"logit_cap": 30.0}, "soft-capped"),
        ({"is_cross_attention": True}, "cross"),
        ({"v_head_dim": 8}, "width"),
    ],
)
def test_models_whose_attention_differs_are_refused_when_loaded(
    changes: dict[str, float], reason: str
) -> None:
    refuse_unsupported_attention(nn.ModuleList([layer()]))
    other = RadixAttention(HEADS, DIM, 0.25, KV_HEADS, 0, **changes)
    with pytest.raises(PlatformError, match=reason):
        refuse_unsupported_attention(nn.ModuleList([layer(), other]))


def test_lengths_may_be_recorded_on_a_stream() -> None:
    lengths = torch.tensor([3, 4])
    streamless = lengths.as_subclass(StreamlessTensor)
    streamless.record_stream(None)
    assert streamless.data_ptr() == lengths.data_ptr()
    assert type(streamless + 1) is Tensor


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_pool_of_another_dtype_hands_out_what_was_written(dtype: torch.dtype) -> None:
    """FP8 is stored as bytes, which must not be read as numbers."""
    pool = make_pool(dtype=dtype)
    slots = torch.tensor([3, 7])
    keys, values = torch.randn(2, 2, KV_HEADS, DIM).unbind()
    pool.set_kv_buffer(layer(), slots, keys.clone(), values.clone())
    kept = pool.kv_pair(1)
    assert kept.dtype == dtype
    assert torch.equal(kept.float()[:, slots], torch.stack([keys, values]).to(dtype).float())
