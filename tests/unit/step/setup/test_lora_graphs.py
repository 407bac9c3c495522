"""With LoRA, graphs read which row has which adapter from buffers that are made once.

The backends are SGLang's own, on CPU tensors: where a row's adapter stands is the same on a GPU.
"""

from __future__ import annotations

import contextlib
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.lora.backend import chunked_backend
from sglang.srt.lora.backend.lora_registry import get_backend_from_name
from sglang.srt.lora.lora_manager import LoRAManager
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner import DecodeCudaGraphRunner

from dflash_sglang.config import Settings, read_settings
from dflash_sglang.cpu.pinning import NoPinning
from dflash_sglang.step.setup import width_capture, width_runners
from dflash_sglang.step.setup.width_runners import WidthRunners

BLOCK = 10  # no multiple of the 16 rows that csgmv cuts segments by
MAX_BATCH = 4
# By place in the pool of adapters: none, and two of different sizes.
RANKS, SCALES = [0, 4, 8], [0.0, 2.0, 0.5]
NONE = -1
BACKENDS = ("csgmv", "triton", "triton_v2")


@pytest.fixture(autouse=True)
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> Any:
    lora = SimpleNamespace(max_lora_chunk_size=16)
    monkeypatch.setattr(chunked_backend, "get_lora", lambda: lora)
    with NoPinning():
        yield


def backend_of(name: str) -> Any:
    options = {"server_args": None} if name == "csgmv" else {}
    return get_backend_from_name(name)(
        max_loras_per_batch=len(RANKS), device=torch.device("cpu"), **options
    )


class Manager:
    """The part of SGLang's manager that a graph runner calls, and its count."""

    init_decode_cuda_graph_batch_info = LoRAManager.init_decode_cuda_graph_batch_info

    def __init__(self, backend: Any) -> None:
        self.lora_backend = backend
        self.attn_dp_enabled = False
        # When the block's graphs were captured; kept, or others could take over their memory.
        self.before: list[torch.Tensor] = []


def graph_runner(
    model_runner: Any, *, attn_backend: Any, speculative_num_draft_tokens: int
) -> SimpleNamespace:
    """What SGLang's constructor does about LoRA."""
    model_runner.lora_manager.init_decode_cuda_graph_batch_info(
        max_bs_in_cuda_graph=MAX_BATCH, num_tokens_per_req=speculative_num_draft_tokens
    )
    return SimpleNamespace(capture_bs=range(1, MAX_BATCH + 1))


def test_sglang_makes_the_buffers_with_every_graph_runner() -> None:
    """What the stand-in above repeats."""
    source = inspect.getsource(DecodeCudaGraphRunner.__init__)
    assert source.count("lora_manager.init_decode_cuda_graph_batch_info(") == 1


def buffers(backend: Any) -> list[torch.Tensor]:
    """What captured kernels read."""
    info = getattr(backend, "decode_cuda_graph_batch_info", None) or backend.cuda_graph_batch_info
    return [value for value in vars(info).values() if isinstance(value, torch.Tensor)]


def memory(tensors: list[torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


class Graph(SimpleNamespace):
    """The settings of CUDA graphs."""

    disable_cuda_graph_padding = False
    cuda_graph_config = None

    def override(self, **_: Any) -> Any:
        return contextlib.nullcontext()


def build_all(monkeypatch: pytest.MonkeyPatch, manager: Manager, settings: Settings) -> None:
    """Build the verifier's runners as the worker does, the block's first."""
    for module in (width_runners, width_capture):
        monkeypatch.setattr(module, "get_exec", lambda: SimpleNamespace(graph=Graph()))
    monkeypatch.setattr(width_runners, "DecodeCudaGraphRunner", graph_runner)
    monkeypatch.setattr(width_runners, "with_phase", lambda config, phase, **_: config)
    monkeypatch.setattr(width_runners, "borrow_buffers", lambda backend, whole: None)
    context = SimpleNamespace(override=lambda *_, **__: None)
    monkeypatch.setattr(width_runners, "get_context", lambda: context)
    spec = SimpleNamespace(speculative_num_draft_tokens=BLOCK)
    monkeypatch.setattr(width_runners, "get_spec", lambda: spec)
    runner = SimpleNamespace(
        lora_manager=manager, attn_backend=None, _get_attention_backend=lambda: None
    )
    runner.decode_cuda_graph_runner = graph_runner(
        runner, attn_backend=None, speculative_num_draft_tokens=BLOCK
    )
    manager.before = buffers(manager.lora_backend)
    runners = WidthRunners(runner)  # type: ignore[arg-type]
    runners.adopt_block()
    width_capture.build_widths(
        settings.width_settings(BLOCK).ladder(BLOCK),
        SimpleNamespace(build=lambda width, sizes: None),  # type: ignore[arg-type]
        runners,
        block_size=BLOCK,
        narrow_max_bs=settings.narrow_cuda_graph_max_bs,
        free_gb=lambda: 80.0,
    )


@pytest.mark.parametrize("name", BACKENDS)
def test_no_lora_buffer_is_replaced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = Manager(backend_of(name))
    made = []
    original = manager.lora_backend.init_decode_cuda_graph_batch_info

    def init(**sizes: int) -> None:
        made.append(sizes)
        original(**sizes)

    manager.lora_backend.init_decode_cuda_graph_batch_info = init
    build_all(monkeypatch, manager, read_settings(None, lora=True))
    assert made == [{"max_bs_in_cuda_graph": MAX_BATCH, "num_tokens_per_req": BLOCK}]
    assert memory(buffers(manager.lora_backend)) == memory(manager.before)


@pytest.mark.parametrize("name", BACKENDS)
def test_several_widths_would_replace_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why there is one width: graphs of the block would read what is gone."""
    manager = Manager(backend_of(name))
    build_all(monkeypatch, manager, read_settings(None, lora=False))
    assert not set(memory(buffers(manager.lora_backend))) & set(memory(manager.before))


# ---- which row has which adapter -------------------------------------------------------------


def verify_batch(requests: int, width: int = BLOCK) -> Any:
    return SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=requests,
        spec_info=SimpleNamespace(draft_token_num=width),
        # A verify plans from its width; lengths of a prefill that was before must not matter.
        extend_seq_lens_cpu=None,
        extend_num_tokens=None,
        return_logprob=False,
    )


def prepare(backend: Any, places: list[int], *, graph: bool) -> None:
    backend.prepare_lora_batch(verify_batch(len(places)), places, RANKS, SCALES, graph)


def places_by_row(backend: Any, rows: int) -> list[int]:
    """The place of each row's adapter as the kernels find it, `NONE` for no adapter."""
    info = backend.batch_info
    if backend.name == "triton_v2":
        return list(info.token_slots[:rows].tolist())
    found = [NONE] * rows
    segments = len(info.weight_indices) if info.use_cuda_graph else info.num_segments
    for segment in range(segments):  # a captured launch covers every segment there is room for
        begin, end = info.seg_indptr[segment : segment + 2].tolist()
        place = int(info.weight_indices[segment])
        if info.lora_ranks[place] == 0:
            continue
        for index in range(begin, min(end, rows)):
            row = index if info.permutation is None else int(info.permutation[index])
            found[row] = place
    return found


def plain_loop(places: list[int]) -> list[int]:
    return [place if RANKS[place] else NONE for place in places for _ in range(BLOCK)]


@pytest.mark.parametrize(
    ("name", "graph"),
    [*((name, graph) for name in BACKENDS for graph in (True, False)), ("torch_native", False)],
)
def test_every_row_of_a_block_has_its_requests_adapter(name: str, graph: bool) -> None:
    backend = backend_of(name)
    backend.init_decode_cuda_graph_batch_info(
        max_bs_in_cuda_graph=MAX_BATCH, num_tokens_per_req=BLOCK
    )
    # A full batch first: a smaller one must not leave rows to it.
    for places in ([2, 1, 2, 1], [1, 0, 2], [0, 0], [2], [0], [1, 1, 2, 2]):
        prepare(backend, places, graph=graph)
        wanted = plain_loop(places)
        padding = [NONE] * ((MAX_BATCH - len(places)) * BLOCK if graph else 0)
        assert places_by_row(backend, len(wanted + padding)) == wanted + padding, places
        info = backend.batch_info
        assert info.lora_ranks[: len(RANKS)].tolist() == RANKS
        assert info.scalings[: len(SCALES)].tolist() == SCALES


@pytest.mark.parametrize("name", BACKENDS)
def test_graphs_read_the_buffers_that_a_step_fills(name: str) -> None:
    backend = backend_of(name)
    backend.init_decode_cuda_graph_batch_info(
        max_bs_in_cuda_graph=MAX_BATCH, num_tokens_per_req=BLOCK
    )
    captured = memory(buffers(backend))
    for places in ([1, 2, 0, 1], [2]):
        prepare(backend, places, graph=True)
        assert memory(buffers(backend)) == captured


@pytest.mark.parametrize("name", ["csgmv", "triton"])
def test_experts_get_the_adapters_of_their_rows(name: str) -> None:
    """What the kernels of LoRA on experts read; triton_v2 reads the rows' places above."""
    backend = backend_of(name)
    backend.init_decode_cuda_graph_batch_info(
        max_bs_in_cuda_graph=MAX_BATCH, num_tokens_per_req=BLOCK
    )
    backend.is_moe_lora = True
    rows = MAX_BATCH * BLOCK
    backend.moe_cg_buffers = {
        "adapter_enabled": torch.zeros(len(RANKS), dtype=torch.int32),
        "token_lora_mapping": torch.full((rows,), NONE, dtype=torch.int32),
    }
    for places in ([2, 1, 2, 1], [1, 0, 2], [0]):
        prepare(backend, places, graph=True)
        padding = [NONE] * (rows - len(places) * BLOCK)
        mapping = backend.moe_cg_buffers["token_lora_mapping"].tolist()
        assert mapping == plain_loop(places) + padding


def test_the_torch_backend_has_no_room_for_a_block_in_a_graph() -> None:
    """Why it is refused with CUDA graphs: one entry a request, and a verify needs one a token."""
    backend = backend_of("torch_native")
    backend.init_decode_cuda_graph_batch_info(
        max_bs_in_cuda_graph=MAX_BATCH, num_tokens_per_req=BLOCK
    )
    with pytest.raises(RuntimeError, match="size of tensor"):
        prepare(backend, [1], graph=True)
