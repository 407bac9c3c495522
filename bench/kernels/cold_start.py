"""Kernels that a start compiles and that serving launches, found on the fake GPU.

Both run the worker's own code: its constructor with the self-test of the ops, and its steps.
"""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from dflash_kernels import self_test
from dflash_kernels.case import part_of
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.harness.fake_gpu.fakes import TAPS, FakeServer, fake_gpu
from bench.harness.fake_gpu.our_worker import make_worker
from bench.harness.fake_gpu.traffic import PUBLIC, Traffic, make_batch, new
from bench.kernels.specialisations import HOPPER, Compile, compiled
from dflash_sglang.core.penalties import PenaltyParams
from dflash_sglang.step import batch_facts
from dflash_sglang.step.penalties import PenalisedRows, Penalties
from dflash_sglang.step.state import DraftState
from dflash_sglang.step.verifier_sampling import VerifierSampler
from dflash_sglang.step.worker import DFlashWorker

PREFILLS = (1, 2, 15, 16, 17, 4096)  # tokens
SIZES = PUBLIC._replace(max_requests=256)


class Requests(NamedTuple):
    """What the requests of a step ask for."""

    sampled: bool = False  # else greedy
    filtered: bool = False  # top-p
    limited: bool = False  # one commits fewer tokens than a block has
    penalised: bool = False


KINDS: Mapping[str, Requests] = {
    "greedy": Requests(),
    "greedy, limited": Requests(limited=True),
    "penalised": Requests(penalised=True),
    "sampled": Requests(sampled=True),
    "sampled, limited": Requests(sampled=True, limited=True),
    "filtered": Requests(sampled=True, filtered=True),
    "filtered, limited": Requests(sampled=True, filtered=True, limited=True),
    "sampled, penalised": Requests(sampled=True, penalised=True),
}


class Started(NamedTuple):
    """A worker that is ready, and its models."""

    server: FakeServer
    worker: DFlashWorker


class Launched(TorchDispatchMode):
    """Runs the launchers of our ops, which on fake tensors are only asked for their shapes."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace != "dflash":
            return func(*args, **(kwargs or {}))
        op = func._schema.name.removeprefix("dflash::")
        return getattr(part_of(op, "kernel"), f"{op}_op")._launch(*args, **(kwargs or {}))


@contextmanager
def started(
    cache_dtype: torch.dtype = SIZES.dtype,
    vocabulary: int = SIZES.vocabulary,
    narrows: bool = False,
    **flags: Any,
) -> Iterator[Started]:
    """A worker after its start, the ops' self-test included; its results are not looked at.

    Args:
        cache_dtype: of the KV pools.
        vocabulary: of the models; their heads are padded to a multiple of 64.
        narrows: whether a single request's drafts bound its verify.
        flags: SGLang's, beside those of the fake GPU.
    """
    sizes = SIZES._replace(vocabulary=vocabulary)
    with ExitStack() as stack:
        stack.enter_context(fake_gpu(sizes, **flags))
        stack.enter_context(mock.patch.object(self_test, "compare"))
        stack.enter_context(mock.patch.object(torch.cuda, "synchronize"))
        server = FakeServer(sizes, cache_dtype)
        yield Started(server, make_worker(server, tests_ops=True, narrows=narrows))


def serve(step: Started, kind: Requests, batch_size: int, width: int) -> None:
    """One decode step."""
    state = DraftState(bonus_tokens=new(batch_size), new_seq_lens=new(batch_size))
    batch = make_batch(Traffic(batch_size, kind.sampled, width), state)
    info, params = batch.sampling_info, batch.reqs[0].sampling_params
    if kind.filtered:
        info.need_top_p_sampling = True
        params.top_p = 0.9
    elif kind.sampled:
        info.need_top_k_sampling = False
        params.top_k = TOP_K_ALL
    if kind.limited:
        params.custom_params = {"dflash": {"max_width": 2}}
    vocabulary = step.server.sizes.vocabulary
    if kind.penalised:
        info.acc_additive_penalties = new(batch_size, vocabulary, dtype=torch.float32)
    with (
        mock.patch.object(step.worker._widths, "choose", return_value=width),
        mock.patch.object(batch_facts, "async_h2d", _copied),
        mock.patch.object(Penalties, "rows_of", return_value=_penalised(vocabulary)),
        mock.patch.object(VerifierSampler, "choose", return_value=new(batch_size, width)),
        step.server.guarded(strict=False),
        Launched(),
    ):
        step.worker.forward_batch_generation(batch)


def prefill(step: Started, tokens: int) -> None:
    """What a prefill launches of ours: the context KV of its tokens."""
    features = new(tokens, len(TAPS) * SIZES.hidden, dtype=SIZES.dtype)
    with step.server.guarded(strict=False), Launched():
        step.worker._context_kv.append(features, new(tokens), new(tokens))


def _copied(values: Sequence[int], *, dtype: torch.dtype, device: object) -> Tensor:
    """A copy to the fake GPU, which no pinned memory is needed for."""
    return new(len(values), dtype=dtype)


def _penalised(vocabulary: int) -> PenalisedRows:
    """One penalised request, in the first row."""
    frequency, presence, repetition = (new(1, dtype=torch.float32) for _ in range(3))
    params = PenaltyParams(frequency, presence, repetition, new(1), new(1, 2))
    counts = new(1, vocabulary, dtype=torch.int32)
    return PenalisedRows([_Request()], new(1), counts, new(1), params)


class _Request:
    """What counts are kept by."""


class Row(NamedTuple):
    """What one op's kernels cost a start whose cache is empty."""

    server: str  # how sampled requests accept
    op: str  # or the module of several
    forms: int  # compiled
    cpu_seconds: float


RULES: Mapping[str, Mapping[str, bool]] = {
    "drafts match": {},
    "block verification": {"speculative_use_block_verification": True},
    "rejection sampling": {"speculative_use_rejection_sampling": True},
}


def measure() -> list[Row]:
    """Starts of a server by each rule, on an H100 or H200; every one with an empty cache."""
    return [
        Row(name, op, len(costs), round(sum(costs), 2))
        for name, flags in RULES.items()
        for op, costs in _by_op(compile_start(HOPPER, **flags)).items()
    ]


def compile_start(arch: int, **flags: Any) -> list[Compile]:
    """Compile what a start compiles, in a cache of its own.

    Args:
        arch: of the GPU, such as 90.
        flags: SGLang's.
    """
    found: list[Compile] = []
    with (
        tempfile.TemporaryDirectory() as cache,
        mock.patch.dict(os.environ, TRITON_CACHE_DIR=cache),
        compiled(found, arch),
        started(**flags),
    ):
        return found


def _by_op(compiles: Sequence[Compile]) -> dict[str, list[float]]:
    """CPU seconds of each compile, the sum of all under "all"."""
    costs: defaultdict[str, list[float]] = defaultdict(list)
    for one in compiles:
        costs[one.what.op].append(one.cpu_seconds)
    return {**costs, "all": [one.cpu_seconds for one in compiles]}
