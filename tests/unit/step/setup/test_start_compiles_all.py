"""What serving launches was compiled at start: Triton's own keys of both, on a fake GPU.

The worker's own code runs, its constructor with the self-test and its steps; Triton binds and
specialises the arguments of every launch, for a GPU that is named and not there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
from dflash_kernels import triton_common
from dflash_kernels.accept_filtered import kernel as accept_filtered_kernel
from dflash_kernels.accept_match import cases as accept_match_cases
from dflash_kernels.accept_match import kernel as accept_match_kernel
from dflash_kernels.accept_sampled import kernel as accept_sampled_kernel
from dflash_kernels.context_kv import kernel as context_kv_kernel
from dflash_kernels.prepare_block import kernel as prepare_block_kernel
from sglang.srt.model_executor.cuda_graph_config import Backend

from bench.kernels.cold_start import KINDS, PREFILLS, prefill, serve, started
from bench.kernels.specialisations import Specialisation, looked_up
from dflash_sglang.step.setup import op_self_test, worker_base

EAGER = SimpleNamespace(
    graph=SimpleNamespace(
        cuda_graph_config=SimpleNamespace(decode=SimpleNamespace(backend=Backend.DISABLED))
    )
)
LADDER = (1, 2, 4, 8, 12, 16)  # the default's widths among them
BATCHES = (1, 2, 16, 17, 256)  # the values and multiples that Triton tells apart, and others


class Server:
    """A worker on the fake GPU; every launch since its start is looked up."""

    def __init__(self, **options: Any) -> None:
        self.warmed: set[Specialisation] = set()
        self.served: set[Specialisation] = set()
        self._stack = ExitStack()
        self._options = options

    def __enter__(self) -> Self:
        with looked_up(self.warmed):
            self.step = self._stack.enter_context(started(**self._options))
        self._stack.enter_context(looked_up(self.served))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def serve(self, kind: str, width: int, *batches: int) -> None:
        """Steps of some batch sizes."""
        for batch_size in batches or BATCHES:
            serve(self.step, KINDS[kind], batch_size, width)

    def late(self) -> set[str]:
        """Ops that serving has launched in a form that the start has not compiled."""
        return {one.op for one in self.served - self.warmed}


def offering(folder: Path, widths: Sequence[int]) -> dict[str, Any]:
    """Flags of a server with these widths, the last one its block size."""
    settings = folder / "settings.json"
    settings.write_text(json.dumps({"widths": widths}))
    return {
        "speculative_num_draft_tokens": widths[-1],
        "speculative_adaptive_config": str(settings),
    }


@pytest.fixture(scope="module")
def ladder(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return offering(tmp_path_factory.mktemp("ladder"), LADDER)


@pytest.fixture(scope="module")
def server(ladder: dict[str, Any]) -> Iterator[Server]:
    with Server(**ladder) as one:
        yield one


@pytest.mark.parametrize("kind", KINDS)
def test_no_width_or_batch_size_needs_a_compile(server: Server, kind: str) -> None:
    for width in LADDER:
        server.serve(kind, width)
    assert server.late() == set()


@pytest.mark.slow
def test_no_batch_size_from_1_to_256_needs_a_compile(server: Server) -> None:
    for batch_size, kind, width in zip(range(1, 257), cycle(KINDS), cycle(LADDER[1:])):
        server.serve(kind, width, batch_size)
    assert server.late() == set()


def test_no_number_of_prompt_tokens_needs_a_compile(server: Server) -> None:
    for tokens in PREFILLS:
        prefill(server.step, tokens)
    assert server.late() == set()
    assert "context_kv" in {one.op for one in server.served}


def test_the_harness_sees_what_serving_launches(server: Server) -> None:
    """One that sees nothing would pass every other test."""
    for kind in ("greedy", "sampled", "filtered"):
        server.serve(kind, 8, 4)
    assert {one.op for one in server.served} >= {
        "prepare_block",
        "draft_tail",
        "accept_match",
        "accept_sampled",
        "accept_filtered",
        "triton_common",
        "context_kv",
    }
    assert len(server.served) <= 16


def test_widths_and_batch_sizes_share_their_forms(server: Server) -> None:
    """A form for each would take a cold start minutes, warmed or not."""
    for width in LADDER:
        server.serve("greedy", width)
    accepting = [one for one in server.served if one.op == "accept_match"]
    assert len(accepting) <= 2  # with and without a limit


def test_rules_for_sampled_drafts_are_not_compiled_where_drafts_match(server: Server) -> None:
    assert "block_verify" not in {one.op for one in server.warmed}


@pytest.mark.parametrize(
    "flag", ["speculative_use_block_verification", "speculative_use_rejection_sampling"]
)
def test_a_rule_for_sampled_drafts_needs_no_compile(flag: str, ladder: dict[str, Any]) -> None:
    with Server(**ladder, **{flag: True}) as server:
        for width in LADDER:
            server.serve("sampled", width, 1, 16, 5)
            server.serve("filtered, limited", width, 2)
            server.serve("greedy", width, 3)
        assert "block_verify" in {one.op for one in server.served}
        assert server.late() == set()


def test_relaxed_acceptance_needs_no_compile(ladder: dict[str, Any]) -> None:
    """Its thresholds may be set while the server runs."""
    with Server(**ladder, speculative_accept_threshold_single=0.5) as server:
        for width in LADDER:
            server.serve("sampled", width)
            server.serve("sampled, limited", width)
        assert server.late() == set()


def test_a_padded_head_needs_no_compile() -> None:
    """Its rows are longer than the vocabulary, and further apart than a row of the logits."""
    with Server(vocabulary=32_003) as server:
        for kind in ("greedy", "sampled", "filtered"):
            server.serve(kind, 4, 3)
        assert "draft_tail" in {one.op for one in server.served}
        assert server.late() == set()


def test_a_bounded_verify_needs_no_compile(ladder: dict[str, Any]) -> None:
    """Its tables lie side by side, the second one at any address."""
    with Server(**ladder, narrows=True) as server:
        for width in LADDER:
            server.serve("greedy", width, 1, 2)
            server.serve("sampled", width, 1)
            server.serve("filtered", width, 1)
        assert "verify_bound" in {one.op for one in server.served}
        assert server.late() == set()


def test_an_fp8_cache_needs_no_compile() -> None:
    with Server(cache_dtype=torch.float8_e4m3fn) as server:
        server.serve("greedy", 4)
        assert "context_kv" in {one.op for one in server.served}
        assert server.late() == set()


def test_compiles_are_watched_when_all_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """What graphs and calibration compile is part of the start."""
    done: list[str] = []
    widths = SimpleNamespace(memory_gb=0.0, seconds=0.0, largest_batch={})

    def step(name: str, result: Any = None) -> Callable[..., Any]:
        def run(*_: Any, **__: Any) -> Any:
            done.append(name)
            return result

        return run

    with Server() as server:
        worker = server.step.worker
        monkeypatch.setattr(worker._drafter, "init_graphs", step("draft graphs"))
        monkeypatch.setattr(worker_base, "build_widths", step("widths", widths))
        monkeypatch.setattr(worker, "_calibrate", step("calibration"))
        monkeypatch.setattr(worker_base, "watch_compiles", step("watch"))
        monkeypatch.setattr(worker_base, "get_exec", lambda: EAGER)
        worker.init_cuda_graphs()
    assert done == ["draft graphs", "widths", "calibration", "watch"]


# ---- wide blocks, and planted faults -----------------------------------------------------------

WIDE = (1, 8, 16, 24, 32)


@pytest.fixture
def wide(tmp_path: Path) -> dict[str, Any]:
    """A server whose widths do not all share their forms."""
    return offering(tmp_path, WIDE)


def serve_all(server: Server) -> None:
    for width in WIDE:
        for kind in ("greedy", "sampled, limited", "filtered"):
            server.serve(kind, width, 3)


def test_blocks_of_32_need_no_compile(wide: dict[str, Any]) -> None:
    with Server(**wide) as server:
        serve_all(server)
        assert server.late() == set()


def test_planted_fault_a_width_that_is_not_warmed(
    wide: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = worker_base.op_shapes

    def without_wide_ones(widths: tuple[int, ...], *rest: Any) -> Any:
        return shapes(tuple(width for width in widths if width <= 16), *rest)

    monkeypatch.setattr(worker_base, "op_shapes", without_wide_ones)
    with Server(**wide) as server:
        serve_all(server)
        assert server.late() == {"prepare_block", "accept_match", "triton_common"}


def test_planted_fault_an_option_that_is_not_warmed(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = accept_match_cases.for_server
    monkeypatch.setattr(
        accept_match_cases,
        "for_server",
        lambda shapes: (case for case in cases(shapes) if "limit" not in case.name),
    )
    with Server() as server:
        server.serve("greedy, limited", 4, 2)
        assert server.late() == {"accept_match"}


def warm_only(width: int) -> Callable[..., Any]:
    """`op_shapes` for a start that compiles at one width."""
    shapes = op_self_test.op_shapes
    return lambda widths, *rest: shapes((width,), *rest)


def serve_narrow(server: Server) -> None:
    for width in (1, 4, 16):
        server.serve("greedy", width, 3)
        server.serve("sampled", width, 3)
        server.serve("filtered", width, 3)
    for tokens in PREFILLS:
        prefill(server.step, tokens)


def test_one_width_warms_the_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel knows the width when it is compiled."""
    monkeypatch.setattr(worker_base, "op_shapes", warm_only(16))
    with Server() as server:
        serve_narrow(server)
        assert server.late() == set()


@pytest.mark.parametrize(
    ("kernel", "parameter", "op"),
    [
        (prepare_block_kernel._prepare_block, "block_size", "prepare_block"),
        (prepare_block_kernel._prepare_block, "table_stride", "prepare_block"),
        (accept_match_kernel._accept_match, "width", "accept_match"),
        (accept_sampled_kernel._sample_tile, "width", "accept_sampled"),
        (accept_filtered_kernel._choose_row, "width", "accept_filtered"),
        (triton_common.accept_request, "draft_stride", "triton_common"),
        (context_kv_kernel._context_kv, "width", "context_kv"),
    ],
)
def test_planted_fault_a_number_that_is_specialised_on(
    kernel: Any, parameter: str, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As every number is that a kernel does not exempt: 1, multiples of 16, others."""
    named = next(one for one in kernel.params if one.name == parameter)
    monkeypatch.setattr(named, "do_not_specialize", False)
    monkeypatch.setattr(worker_base, "op_shapes", warm_only(8))
    with Server() as server:
        serve_narrow(server)
        assert server.late() == {op}
