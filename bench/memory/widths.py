"""How much memory do the widths below the block add on a GPU, and how many graphs?

    python -m bench.memory widths --json FILE

SGLang's own attention backends allocate what their captured forwards read, on fake tensors, once
for the block and once for every other width of the default ladder, at a context of 262,144 tokens
and pages of one. Counted is what the other widths add: buffers that are not the block's, and the
plan buffers of FlashInfer's wrappers. "Alone" is the same if nothing were shared. Not counted, and
not known without a GPU: what the driver keeps for a graph.
"""

import itertools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from sglang.srt.arg_groups.cuda_graph_hook import generate_decode_cuda_graph_batch_sizes
from sglang.srt.runtime_context import get_context, get_exec
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from bench import report
from dflash_sglang.config import Settings
from dflash_sglang.step.setup.shared_buffers import borrow_buffers
from dflash_sglang.step.setup.width_capture import few_batch_sizes

BLOCK = 16
CONTEXT = 262_144
REQUESTS = (8, 48, 256)
# Qwen3.6-35B-A3B and its drafter, as one GPU has them.
HEADS, HEAD_DIM = {"verifier": 16, "drafter": 32}, {"verifier": 256, "drafter": 128}
KV_SPLITS = 8  # SGLang's default


class Row(NamedTuple):
    """All widths of one kind of backend at one largest batch size."""

    backend: str
    requests: int
    added_gb: float  # on the device, by verifier and drafter
    moment_gb: float  # while one width is built, at most
    alone_gb: float  # if nothing were shared
    pinned_gb: float  # on the host
    pinned_alone_gb: float
    graphs: int  # of all widths, the block's among them
    graphs_of_sglang: int


def fa3(width: int, role: str) -> Any:
    """SGLang's FlashAttention backend, as far as `init_cuda_graph_state` reads it."""
    from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend

    return _bare(
        FlashAttentionBackend,
        max_context_len=CONTEXT,
        page_size=1,
        device="cuda",
        topk=1,
        speculative_num_draft_tokens=width,
        is_draft_runner=role == "drafter",
        skip_prefill=False,
        is_encoder_decoder=False,
        use_mla=False,
        use_sliding_window_kv_pool=False,
        local_attn_builder=None,
        _get_scheduler_metadata=None,
    )


def triton(width: int, role: str) -> Any:
    """SGLang's Triton backend, likewise."""
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    return _bare(
        TritonAttnBackend,
        max_context_len=CONTEXT,
        device="cuda",
        num_draft_tokens=width,
        num_head=HEADS[role],
        v_head_dim=HEAD_DIM[role],
        swa_v_head_dim=None,
        max_kv_splits=KV_SPLITS,
        is_draft_runner=role == "drafter",
        skip_prefill=False,
        sliding_window_size=None,
        use_sliding_window_kv_pool=False,
        dllm_attention=None,
        lean_total_programs=264,  # two for each multiprocessor of an H200
        lean_block_m=16,
    )


def flashinfer(width: int, role: str) -> Any:
    """SGLang's FlashInfer backend, likewise, with the wrappers that it runs eagerly."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper as Decode
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper as Prefill
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper as Ragged
    from sglang.srt.layers.attention import flashinfer_backend

    # SGLang imports it where it finds CUDA.
    vars(flashinfer_backend).setdefault("BatchPrefillWithPagedKVCacheWrapper", Prefill)
    workspace = torch.empty(1, dtype=torch.uint8, device="cuda")
    lengths = torch.zeros(max(REQUESTS) + 1, dtype=torch.int32, device="cuda")
    return _bare(
        flashinfer_backend.FlashInferAttnBackend,
        max_context_len=CONTEXT,
        num_wrappers=1,
        use_sliding_window_kv_pool=False,
        skip_prefill=False,
        kv_indptr=[lengths],
        kv_last_page_len=lengths,
        workspace_buffer=workspace,
        prefill_backend="fa2",
        prefill_cuda_graph_metadata={},
        prefill_wrapper_ragged=Ragged(workspace, "NHD"),
        prefill_wrappers_paged=[Prefill(workspace, "NHD")],
        prefill_wrappers_verify=[Prefill(workspace, "NHD")],
        decode_wrappers=[Decode(workspace, "NHD")],
    )


BACKENDS: dict[str, Callable[[int, str], Any]] = {
    "fa3": fa3,
    "triton": triton,
    "flashinfer": flashinfer,
}


def count(backend: str, requests: int, settings: Settings) -> Row:
    """What all widths of the ladder add to those of the block."""
    ladder = settings.width_settings(BLOCK).ladder(BLOCK)
    captured = generate_decode_cuda_graph_batch_sizes(_flags(), requests)
    plain = few_batch_sizes(captured, requests)
    narrow = few_batch_sizes(captured, settings.narrow_cuda_graph_max_bs)
    graphs = len(captured) * 2
    sizes: dict[str, list[float]] = {}
    moments: list[int] = []
    for shared in (True, False):
        added: list[Tensor] = []
        for role in ("verifier", "drafter"):
            whole = BACKENDS[backend](BLOCK, role)
            capture(whole, BLOCK, captured)
            for width in ladder[:-1]:
                if width == 1 and role == "drafter":
                    continue  # plain decoding drafts nothing
                one = BACKENDS[backend](width, role)
                if shared:
                    borrow_buffers(one, whole)
                batch_sizes = plain if width == 1 else narrow
                with Allocations(tensors(whole)) as moment:
                    capture(one, width, batch_sizes)
                if shared:
                    graphs += len(batch_sizes)
                    moments.append(moment.most)
                added += tensors(one, known=tensors(whole))
        sizes["shared" if shared else "alone"] = [
            round(size(one for one in added if one.device.type == device) / 1e9, 3)
            for device in ("cuda", "cpu")
        ]
    (added_gb, pinned_gb), (alone_gb, pinned_alone_gb) = sizes["shared"], sizes["alone"]
    return Row(
        backend,
        requests,
        added_gb=added_gb,
        moment_gb=round(max(moments) / 1e9, 3),
        alone_gb=alone_gb,
        pinned_gb=pinned_gb,
        pinned_alone_gb=pinned_alone_gb,
        graphs=graphs,
        graphs_of_sglang=2 * len(captured),
    )


def capture(backend: Any, width: int, batch_sizes: Sequence[int]) -> None:
    """Allocate what graphs of these batch sizes read, as SGLang's graph runner does."""
    largest = max(batch_sizes)
    backend.init_cuda_graph_state(largest, largest * width)
    if hasattr(backend, "prefill_cuda_graph_metadata"):
        for batch_size in batch_sizes:
            wrappers = backend._create_prefill_wrappers(batch_size)
            backend.prefill_cuda_graph_metadata[batch_size] = wrappers


class Allocations(TorchDispatchMode):
    """Bytes of the device in use at once, of what is allocated while it is active, at most."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.most = 0
        self._known = {one.untyped_storage()._cdata for one in known}
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an op and counts what is alive behind it."""
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.device.type == "cuda":
            storage = result.untyped_storage()
            if storage._cdata not in self._known:
                self._alive.setdefault(storage._cdata, (weakref.ref(result), storage.nbytes()))
            self._alive = {
                key: (one, taken) for key, (one, taken) in self._alive.items() if one() is not None
            }
            self.most = max(self.most, sum(taken for _, taken in self._alive.values()))
        return result


def size(found: Iterable[Tensor]) -> int:
    """Bytes of memory under some tensors."""
    return sum(one.untyped_storage().nbytes() for one in found)


def tensors(backend: Any, known: Iterable[Tensor] = ()) -> list[Tensor]:
    """One tensor for each piece of memory that a backend refers to and `known` does not."""
    seen = {one.untyped_storage()._cdata for one in known}
    found = []
    for one in _reachable(backend, set()):
        if one.untyped_storage()._cdata not in seen:
            seen.add(one.untyped_storage()._cdata)
            found.append(one)
    return found


def _reachable(value: Any, visited: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _reachable(entry, visited)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _reachable(entry, visited)
    elif type(value).__module__.startswith(("sglang.", "flashinfer.")) and id(value) not in visited:
        visited.add(id(value))
        names = getattr(value, "__struct_fields__", None) or vars(value)
        for name in names:
            yield from _reachable(getattr(value, name), visited)


def _bare(backend: type, **attributes: Any) -> Any:
    """An instance that was not constructed: a constructor wants a model runner."""
    made: Any = object.__new__(backend)
    made.__dict__.update(attributes)
    return made


def _flags() -> Any:
    return SimpleNamespace(disable_cuda_graph_padding=False, speculative_algorithm="DFLASH")


@contextmanager
def fake_device() -> Iterator[None]:
    """CUDA tensors without memory, and what SGLang's backends import of a driver's libraries."""
    empty = torch.empty

    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        return empty(*args, **kwargs)

    drivers = {} if torch.cuda.is_available() else {"sgl_kernel": mock.MagicMock()}
    with (
        get_context().override_server_args(speculative_algorithm="DFLASH"),
        FakeTensorMode(),
        mock.patch.dict(sys.modules, drivers),
        mock.patch.object(torch, "empty", unpinned),
        warnings.catch_warnings(),
    ):
        # FlashInfer checks how its workspace is aligned.
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    given = report.new_parser("bench.memory.widths", __doc__).parse_args(argv)
    with fake_device():
        assert not get_exec().graph.disable_cuda_graph_padding
        cells = itertools.product(BACKENDS, REQUESTS)
        rows = [count(backend, requests, Settings()) for backend, requests in cells]
    lines = [
        {
            "backend": row.backend,
            "requests": row.requests,
            "GB added": f"{row.added_gb:.2f}",
            "for a moment": f"{row.moment_gb:.2f}",
            "GB alone": f"{row.alone_gb:.2f}",
            "GB pinned": f"{row.pinned_gb:.2f}",
            "pinned alone": f"{row.pinned_alone_gb:.2f}",
            "graphs": row.graphs,
            "times SGLang's": f"{row.graphs / row.graphs_of_sglang:.2f}",
        }
        for row in rows
    ]
    print(report.table(lines, given.markdown))
    report.write_json(given, {"rows": rows}, key="provenance")
    return 0


if __name__ == "__main__":
    sys.exit(main())
