"""The drafter's FlashInfer calls, dry: every argument of plan and run, with no GPU and no kernel.

FlashInfer's own Python runs; only its compiled module is a recorder. What would be on the GPU is on
the "meta" device, where a tensor has no contents: planning that reads a length, or anything else,
back from the device raises.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import flashinfer
import flashinfer.prefill
import pytest
import torch
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.models.dflash import _get_dflash_layer_attention_params
from torch import Tensor, nn

from dflash_sglang.core.draft_attention import AttentionWindow, Shape, paged_layout, plan
from dflash_sglang.step.setup import draft_attention as block_attention
from dflash_sglang.step.setup.draft_attention import BlockAttention, window_of
from tests.unit.core.test_draft_attention import keys_defined, seen_by_kernel

BLOCK = 16
HEADS, KV_HEADS, HEAD_DIM = 32, 4, 128
WINDOW = 24
MAX_BS = 64
COLUMNS = 600  # of the request-to-slot table
FULL, SLIDING = AttentionWindow(-1, causal=False), AttentionWindow(WINDOW - 1, causal=True)
BIDIRECTIONAL = AttentionWindow(WINDOW - 1, causal=False)
DRAFTERS = {"full": (FULL,), "windowed": (SLIDING, BIDIRECTIONAL), "mixed": (FULL, SLIDING)}


class Plan(NamedTuple):
    """Arguments of the compiled module's plan, in its order (csrc/batch_prefill.cu)."""

    float_workspace: Tensor
    int_workspace: Tensor
    pinned_workspace: Tensor
    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_lens: Tensor
    max_rows: int
    batch_size: int
    num_heads: int
    num_kv_heads: int
    page_size: int
    cuda_graph: bool
    head_dim_qk: int
    head_dim_vo: int
    causal: bool
    window_left: int
    fixed_split_size: int
    disable_split_kv: bool
    num_colocated_ctas: int
    uniform_q_len: int


class Recorder:
    """In place of FlashInfer's compiled modules."""

    def __init__(self) -> None:
        self.modules: list[tuple[Any, ...]] = []
        self.plans: list[Plan] = []
        self.runs: list[tuple[Any, ...]] = []

    def module(self, *key: Any) -> SimpleNamespace:
        self.modules.append(key)
        return SimpleNamespace(plan=self._plan, paged_run=lambda *given: self.runs.append(given))

    def _plan(self, *given: Any) -> str:
        self.plans.append(Plan(*given))
        return "plan info"


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder, empty = Recorder(), torch.empty

    def pageable(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return empty(*args, **options)  # no driver, no pinned memory

    with (
        mock.patch.object(flashinfer.prefill, "get_batch_prefill_module", recorder.module),
        mock.patch.object(flashinfer.prefill, "device_support_pdl", return_value=False),
        mock.patch.object(torch, "empty", pageable),
    ):
        yield recorder


class Translator:
    """Slot ids of a request-to-slot table; on "meta" nothing is written."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def pack_read_stream(
        self,
        plan: str,
        *,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        indptr: Tensor,
        out: Tensor,
        kv_start_idx: Tensor,
    ) -> bool:
        assert plan == "this step's"
        assert len(req_pool_indices) == len(seq_lens) == len(kv_start_idx) == len(indptr) - 1
        assert seq_lens.device == indptr.device == kv_start_idx.device == out.device
        if out.device.type == "meta":
            return False
        for row, length, at, start in zip(
            req_pool_indices.tolist(),
            seq_lens.tolist(),
            indptr.tolist(),
            kv_start_idx.tolist(),
            strict=False,
        ):
            out[at : at + length] = self.table[row, start : start + length]
        return False


class Pool:
    """A drafter's KV pool."""

    dtype = torch.bfloat16

    def __init__(self, slots: int, device: str) -> None:
        self.rows = torch.zeros(slots, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
        self.written: list[Any] = []

    def set_kv_buffer(self, layer: Any, loc: Any, k: Tensor, v: Tensor, *scales: Any) -> None:
        self.written.append((layer.layer_id, loc.loc, k, v, *scales))

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        return self.rows, self.rows


def layer(index: int, window: AttentionWindow) -> RadixAttention:
    kind = AttentionType.DECODER if window.causal else AttentionType.ENCODER_ONLY
    return RadixAttention(
        HEADS,
        HEAD_DIM,
        0.5,
        KV_HEADS,
        index,
        sliding_window_size=window.window_left,
        attn_type=kind,
    )


def make_runner(windows: tuple[AttentionWindow, ...], device: str) -> SimpleNamespace:
    table = torch.arange((MAX_BS + 1) * COLUMNS, dtype=torch.int32).flip(0).view(-1, COLUMNS)
    return SimpleNamespace(
        kv_index_translator=Translator(table),
        token_to_kv_pool=Pool(table.numel(), device),
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        model=nn.ModuleList(layer(index, window) for index, window in enumerate(windows)),
        dtype=torch.bfloat16,
        device="cuda",
    )


def make_backend(
    windows: tuple[AttentionWindow, ...], device: str
) -> tuple[BlockAttention, SimpleNamespace]:
    runner = make_runner(windows, device)
    workspace = torch.zeros(1 << 10, dtype=torch.uint8, device=device)
    backend = BlockAttention(runner, workspace, BLOCK)
    backend.init_cuda_graph_state(MAX_BS, MAX_BS * BLOCK)
    return backend, runner


def prefixes(bs: int) -> Tensor:
    """Every kind of length: none, inside the window, at its edges, far past it."""
    some = torch.tensor([300, 0, 1, WINDOW - 1, WINDOW, WINDOW + 1, COLUMNS - BLOCK])
    return some.repeat(bs // len(some) + 1)[:bs]


def batch(prefix_lens: Tensor, device: str) -> SimpleNamespace:
    bs = len(prefix_lens)
    return SimpleNamespace(
        batch_size=bs,
        seq_lens=torch.zeros(bs, dtype=torch.int64, device=device),  # must not matter
        seq_lens_cpu=prefix_lens + BLOCK,
        req_pool_indices=torch.arange(1, bs + 1, device=device),
        out_cache_loc=torch.zeros(bs * BLOCK, dtype=torch.int64, device=device),
        kv_loc_plan="this step's",
    )


def attend(backend: BlockAttention, runner: SimpleNamespace, given: SimpleNamespace) -> None:
    for one in runner.model:
        q = torch.zeros(given.batch_size * BLOCK, HEADS * HEAD_DIM, dtype=torch.bfloat16)
        q = q.to(given.out_cache_loc.device)
        k = q[:, : KV_HEADS * HEAD_DIM].view(-1, KV_HEADS, HEAD_DIM)
        # No location object of SGLang's pools is needed to see what is written where.
        with mock.patch.object(
            block_attention.KVWriteLoc,
            "for_layer",
            lambda given, _: SimpleNamespace(loc=given.out_cache_loc),
        ):
            out = backend.forward_extend(q, k, k, one, given)
        assert out.shape == q.shape


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("bs", [1, 7, 64])
def test_every_argument_of_plan_and_run(
    bs: int, drafter: str, captured: bool, recorder: Recorder
) -> None:
    windows = DRAFTERS[drafter]
    backend, runner = make_backend(windows, "meta")
    given = batch(prefixes(bs), "meta")
    if captured:
        backend.init_forward_metadata_out_graph(batch(torch.zeros(bs).long(), "meta"), True)
        recorder.plans.clear()
        backend.init_forward_metadata_out_graph(given)
    else:
        backend.init_forward_metadata(given)
    attend(backend, runner, given)

    assert {key[0] for key in recorder.modules} == {"fa2"}
    for one in recorder.plans:
        window = AttentionWindow(one.window_left, one.causal)
        expected = paged_layout(prefixes(bs), BLOCK, window)
        assert window in windows
        assert one.qo_indptr.tolist() == list(range(0, (bs + 1) * BLOCK, BLOCK))
        assert torch.equal(one.kv_indptr, expected.kv_indptr)
        assert torch.equal(one.kv_lens, expected.kv_lens)
        for host in (one.qo_indptr, one.kv_indptr, one.kv_lens):
            assert (host.dtype, host.device.type) == (torch.int32, "cpu")
        assert one.float_workspace.device.type == one.int_workspace.device.type == "meta"
        assert one.pinned_workspace.device.type == "cpu"
        assert one[6:14] == (bs * BLOCK, bs, HEADS, KV_HEADS, 1, captured, HEAD_DIM, HEAD_DIM)
        assert one[16:] == (-1, False, 0, 0)
    assert {AttentionWindow(one.window_left, one.causal) for one in recorder.plans} == set(windows)
    assert len(recorder.plans) == len(windows)

    assert len(recorder.runs) == len(windows)
    modes = flashinfer.prefill.MaskMode  # type: ignore[attr-defined]
    for window, run in zip(windows, recorder.runs, strict=True):
        q, k, v, qo_indptr, kv_indptr, kv_indices, last_page_lens, out, lse, mask_mode = run[3:13]
        assert run[2] == "plan info"
        assert q.shape == out.shape == (bs * BLOCK, HEADS, HEAD_DIM)
        assert k.shape == v.shape == (runner.token_to_kv_pool.rows.shape[0], 1, KV_HEADS, HEAD_DIM)
        assert (len(qo_indptr), len(kv_indptr), len(last_page_lens)) == (bs + 1, bs + 1, bs)
        assert lse is None
        assert mask_mode == (modes.CAUSAL if window.causal else modes.NON_CAUSAL).value
        assert run[14] == window.window_left
        assert run[16] is None  # no mask buffer
        assert run[17] is None
        assert run[23] == 0.5  # the scale of the scores
        if captured:
            assert kv_indices.data_ptr() == backend._buffers[window].kv_indices.data_ptr()
        else:
            assert len(kv_indices) == int(paged_layout(prefixes(bs), BLOCK, window).kv_indptr[-1])
    keys = {key[8] for key in recorder.modules}  # whether the kernel has windows
    assert keys == {window.window_left >= 0 for window in windows}


@pytest.mark.parametrize("window", [FULL, SLIDING, BIDIRECTIONAL])
@pytest.mark.parametrize("bs", [1, 7, 64])
def test_pages_of_16(bs: int, window: AttentionWindow, recorder: Recorder) -> None:
    """The same planner over pages: SGLang's index lists are of single slots, whatever its pages."""
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        torch.zeros(1 << 10, dtype=torch.uint8, device="meta"), "NHD", backend="fa2"
    )
    layout = paged_layout(prefixes(bs), BLOCK, window, page_size=16)
    pages = torch.zeros(int(layout.kv_indptr[-1]), dtype=torch.int32, device="meta")
    shape = Shape(HEADS, KV_HEADS, HEAD_DIM, 0.5, 0.0, torch.bfloat16, torch.float8_e4m3fn)
    plan(wrapper, layout, pages, window, shape, page_size=16)
    (one,) = recorder.plans
    assert torch.equal(one.kv_indptr, layout.kv_indptr)
    assert torch.equal(one.kv_lens, layout.kv_lens)  # FlashInfer's own, from pages and their ends
    assert (one.page_size, one.causal, one.window_left) == (16, window.causal, window.window_left)
    assert recorder.modules == [
        (
            "fa2",
            torch.bfloat16,
            torch.float8_e4m3fn,
            torch.bfloat16,
            torch.int32,
            HEAD_DIM,
            HEAD_DIM,
            0,  # no rotary embedding
            window.window_left >= 0,
            False,  # no soft cap
            False,  # scores in float32
        )
    ]


def test_planning_from_lengths_on_the_device_would_be_noticed(recorder: Recorder) -> None:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        torch.zeros(1 << 10, dtype=torch.uint8, device="meta"), "NHD", backend="fa2"
    )
    lengths = torch.zeros(3, dtype=torch.int32, device="meta")
    with pytest.raises(NotImplementedError):  # "Cannot copy out of meta tensor"
        wrapper.plan(lengths, lengths, lengths, lengths[1:], HEADS, KV_HEADS, HEAD_DIM, 1)


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_each_slot_reads_the_kv_slots_of_its_keys(
    drafter: str, captured: bool, recorder: Recorder
) -> None:
    """From the table's rows through the index list and the kernel's rule to the definition."""
    backend, runner = make_backend(DRAFTERS[drafter], "cpu")
    table, given = runner.req_to_token_pool.req_to_token, batch(prefixes(7), "cpu")
    if captured:
        # Captured at another batch's lengths, as it is at start.
        backend.init_forward_metadata_out_graph(batch(torch.full((7,), 40), "cpu"), True)
        backend.init_forward_metadata_out_graph(given)
    else:
        backend.init_forward_metadata(given)
    attend(backend, runner, given)
    for window, run in zip(DRAFTERS[drafter], recorder.runs, strict=True):
        kv_indptr, kv_indices = run[7].tolist(), run[8]
        layout = paged_layout(prefixes(7), BLOCK, window)
        reach = None if window.window_left < 0 else window.window_left + 1
        for row, prefix in enumerate(prefixes(7).tolist()):
            slots = kv_indices[kv_indptr[row] : kv_indptr[row + 1]]
            seen = seen_by_kernel(layout, row, BLOCK, window)
            defined = keys_defined(prefix, BLOCK, reach, window.causal)
            for keys, positions in zip(seen, defined, strict=True):
                expected = table[row + 1, sorted(positions)]
                assert torch.equal(slots[keys], expected)


def test_rows_that_pad_a_captured_batch_read_no_context(recorder: Recorder) -> None:
    backend, _ = make_backend((FULL,), "meta")
    given = batch(torch.tensor([40, 0, 0]), "meta")
    given.seq_lens_cpu[1:] = backend.get_cuda_graph_seq_len_fill_value()
    backend.init_forward_metadata_out_graph(given, in_capture=True)
    assert recorder.plans[0].kv_lens.tolist() == [40 + BLOCK, BLOCK, BLOCK]


@pytest.mark.parametrize("window", [FULL, SLIDING])
def test_the_index_buffer_holds_the_largest_batch_of_the_longest_requests(
    window: AttentionWindow,
) -> None:
    with mock.patch.object(BlockAttention, "_wrapper", return_value=None):
        backend, _ = make_backend((window,), "meta")
    longest = torch.full((MAX_BS,), COLUMNS - BLOCK)
    needed = int(paged_layout(longest, BLOCK, window).kv_indptr[-1])
    assert len(backend._buffers[window].kv_indices) == needed


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_narrower_width_plans_into_the_blocks_buffers(drafter: str, recorder: Recorder) -> None:
    """Else every width and batch size takes 16 MiB, and a list of slots as long as the context."""
    windows = DRAFTERS[drafter]
    whole, _ = make_backend(windows, "meta")
    whole.init_forward_metadata_out_graph(batch(prefixes(7), "meta"), in_capture=True)
    runner = make_runner(windows, "meta")
    narrow = BlockAttention(runner, torch.zeros(1 << 10, dtype=torch.uint8, device="meta"), 4)
    narrow.borrow(whole)
    narrow.init_cuda_graph_state(MAX_BS, MAX_BS * 4)
    narrow.init_forward_metadata_out_graph(batch(prefixes(7), "meta"), in_capture=True)
    plans, kinds = recorder.plans, len(set(windows))
    for ours, theirs in zip(plans[-kinds:], plans[:kinds], strict=True):
        assert ours.int_workspace is theirs.int_workspace
        assert ours.pinned_workspace is theirs.pinned_workspace
    assert len({id(one.int_workspace) for one in plans[:kinds]}) == kinds
    for window in set(windows):
        assert narrow._buffers[window].kv_indices is whole._buffers[window].kv_indices
    narrow.init_forward_metadata_out_graph(batch(prefixes(9), "meta"), in_capture=True)
    assert recorder.plans[-1].int_workspace is not plans[0].int_workspace  # the block has no 9


def test_keys_and_values_of_the_block_are_written_first(recorder: Recorder) -> None:
    backend, runner = make_backend((FULL, SLIDING), "meta")
    given = batch(prefixes(2), "meta")
    backend.init_forward_metadata(given)
    attend(backend, runner, given)
    written = runner.token_to_kv_pool.written
    assert [entry[0] for entry in written] == [0, 1]
    assert all(entry[1] is given.out_cache_loc for entry in written)


def test_sights_are_those_of_the_served_drafter() -> None:
    """SGLang's layer parameters for a configuration, and what we make of them."""
    config = SimpleNamespace(
        layer_types=["full_attention", "sliding_attention"], sliding_window=WINDOW
    )
    config.get_text_config = lambda: config
    windows = []
    for index in range(2):
        window, kind = _get_dflash_layer_attention_params(config, index)
        made = RadixAttention(1, 64, 1.0, 1, index, sliding_window_size=window, attn_type=kind)
        windows.append(window_of(made))
    assert windows == [FULL, SLIDING]


def test_the_kernels_rule_is_the_one_that_the_layout_rests_on() -> None:
    folder = Path(flashinfer.__file__).parent / "data/include/flashinfer/attention"
    variants, prefill = ((folder / name).read_text() for name in ("variants.cuh", "prefill.cuh"))
    assert "mask &= (kv_idx + qo_len + window_left >= kv_len + qo_idx);" in variants
    assert "? (kv_idx + qo_len > kv_len + q_idx || (kv_idx >= chunk_end))" in prefill
    # Non-causal calls mask as well where a window begins.
    assert "(iter >= mask_iteration || iter < window_iteration)" in prefill


@contextlib.contextmanager
def chosen_by_sglang(**facts: Any) -> Iterator[tuple[SimpleNamespace, Any]]:
    """A drafter's runner with SGLang's FlashInfer backend."""
    runner = make_runner((FULL,), "cpu")
    theirs = object.__new__(FlashInferAttnBackend)
    theirs.use_sliding_window_kv_pool = facts.get("sliding", False)
    theirs.workspace_buffer = torch.zeros(1 << 10, dtype=torch.uint8)
    runner.attn_backend = facts.get("other", theirs)
    runner.token_to_kv_pool.dtype = facts.get("cache", torch.bfloat16)
    runner.device = facts.get("device", "cuda")
    with mock.patch.object(BlockAttention, "_wrapper", return_value=None):
        yield runner, runner.attn_backend


def test_ours_takes_the_place_of_sglangs() -> None:
    with chosen_by_sglang() as (runner, theirs):
        ours = block_attention.select_draft_backend(runner, theirs, BLOCK)
    assert isinstance(ours, BlockAttention)
    assert ours.kv_index_translator is runner.kv_index_translator
    assert ours.needs_cpu_seq_lens  # or lengths on the host would be a bound


@pytest.mark.parametrize(
    "facts",
    [
        {"device": "cpu"},
        {"other": "triton"},
        {"sliding": True},
        {"cache": torch.float8_e5m2},
    ],
    ids=lambda facts: next(iter(facts)),
)
def test_another_choice_stays(facts: dict[str, Any]) -> None:
    with chosen_by_sglang(**facts) as (runner, theirs):
        assert block_attention.select_draft_backend(runner, theirs, BLOCK) is theirs
