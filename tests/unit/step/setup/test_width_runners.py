"""A width's backend and graphs: made under its own settings, which are gone afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig
from sglang.srt.runtime_context import get_context, get_exec, get_spec

from dflash_sglang.step.setup import width_runners
from dflash_sglang.step.setup.width_capture import free_memory_gb
from dflash_sglang.step.setup.width_runners import WidthRunners
from dflash_sglang.step.setup.worker_base import WorkerBase

BLOCK = 16
WHOLE = SimpleNamespace(name="block's")


class GraphRunner:
    """SGLang's, as far as it reads its settings."""

    def __init__(
        self, runner: Any, *, attn_backend: Any, speculative_num_draft_tokens: int
    ) -> None:
        self.attn_backend, self.width = attn_backend, speculative_num_draft_tokens
        self.capture_bs = list(get_exec().graph.cuda_graph_config.decode.bs)
        assert get_spec().speculative_num_draft_tokens == self.width


@pytest.fixture
def model_runner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def backend() -> Any:
        width = get_spec().speculative_num_draft_tokens
        return SimpleNamespace(width=width, init_cuda_graph_state=lambda *_: None)

    monkeypatch.setattr(width_runners, "DecodeCudaGraphRunner", GraphRunner)
    flags = {"speculative_algorithm": "DFLASH", "speculative_num_draft_tokens": BLOCK}
    with get_context().override_server_args(**flags):
        graph = get_exec().graph
        config = width_runners.with_phase(CudaGraphConfig(), "decode", bs=[1, 2, 3, 4])
        with graph.override(cuda_graph_config=config):
            yield SimpleNamespace(
                attn_backend=WHOLE,
                decode_cuda_graph_runner=SimpleNamespace(capture_bs=[1, 2, 3, 4]),
                _get_attention_backend=backend,
            )


def built(model_runner: Any, batch_sizes: Sequence[int] | None) -> WidthRunners:
    runners = WidthRunners(model_runner)
    runners.adopt_block()
    runners.build(4, batch_sizes)
    return runners


def test_a_width_captures_its_own_batch_sizes_and_the_block_keeps_its(model_runner: Any) -> None:
    runners = built(model_runner, [1, 3])
    assert runners.captured(4) == (1, 3)
    assert runners.captured(BLOCK) == (1, 2, 3, 4)
    assert get_exec().graph.cuda_graph_config.decode.bs == [1, 2, 3, 4]
    assert get_spec().speculative_num_draft_tokens == BLOCK
    assert runners.backend(4).width == 4


def test_nothing_is_captured_where_the_platform_does_not(model_runner: Any) -> None:
    runners = built(model_runner, None)
    assert runners.captured(4) == ()
    runners.activate(4)
    assert model_runner.decode_cuda_graph_runner is None


def test_the_block_is_never_built_again(model_runner: Any) -> None:
    runners = built(model_runner, [1])
    runners.build(BLOCK, [1])
    assert runners.backend(BLOCK) is WHOLE
    assert runners.captured(BLOCK) == (1, 2, 3, 4)


def test_a_width_borrows_from_the_block(model_runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    borrowed: list[Any] = []
    monkeypatch.setattr(width_runners, "borrow_buffers", lambda *both: borrowed.append(both))
    runners = built(model_runner, [1])
    assert borrowed == [(runners.backend(4), WHOLE)]
    built(model_runner, None)
    assert len(borrowed) == 1  # no graph, no buffer


def test_the_eager_runner_of_a_block_has_no_batch_sizes(model_runner: Any) -> None:
    model_runner.decode_cuda_graph_runner = SimpleNamespace()
    runners = WidthRunners(model_runner)
    runners.adopt_block()
    assert runners.captured(BLOCK) == ()


@pytest.mark.parametrize(
    ("held", "captured", "largest"), [(4, (), 4), (48, (1, 2, 32), 32), (20, (1, 2, 24), 20)]
)
def test_the_largest_batch_that_is_measured_is_held_and_captured(
    held: int, captured: tuple[int, ...], largest: int
) -> None:
    worker: Any = SimpleNamespace(
        model_runner=SimpleNamespace(max_running_requests=held),
        block_size=BLOCK,
        _width_runners=SimpleNamespace(captured=lambda width: captured),
    )
    with get_context().override_server_args(max_running_requests=64):  # what was asked for
        assert WorkerBase._largest_batch(worker) == largest


def test_free_memory_is_known_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(world_size=1, cpu_group=None)
    monkeypatch.setattr(
        "dflash_sglang.step.setup.width_capture.get_parallel",
        lambda: SimpleNamespace(tp_group=group),
    )
    free: float = free_memory_gb(SimpleNamespace(device="cpu", gpu_id=0))  # type: ignore[arg-type]
    assert 0 < free < 1e5


def test_ranks_take_the_least_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one would build a width that another leaves out, and wait for it."""
    asked: dict[str, Any] = {}

    def reading(device: str, gpu_id: int, **given: Any) -> float:
        asked.update(given)
        return 7.0

    module = "dflash_sglang.step.setup.width_capture"
    group = SimpleNamespace(world_size=2, cpu_group="ranks")
    monkeypatch.setattr(f"{module}.get_parallel", lambda: SimpleNamespace(tp_group=group))
    monkeypatch.setattr(f"{module}.get_available_gpu_memory", reading)
    assert free_memory_gb(SimpleNamespace(device="cuda", gpu_id=1)) == 7.0  # type: ignore[arg-type]
    assert asked == {"distributed": True, "cpu_group": "ranks"}
