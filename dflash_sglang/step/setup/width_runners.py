"""An attention backend and CUDA graphs of a model for each width of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.model_executor.cuda_graph_config import with_phase
from sglang.srt.model_executor.runner import DecodeCudaGraphRunner
from sglang.srt.runtime_context import get_context, get_exec, get_spec

from dflash_sglang.step.setup.draft_attention import BlockAttention
from dflash_sglang.step.setup.shared_buffers import borrow_buffers

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

_SOURCE = "dflash_sglang.width"


class Runner(NamedTuple):
    """One width's share of a model runner."""

    attn_backend: Any
    graph_runner: Any  # None where nothing is captured


class WidthRunners:
    """Switches a model runner, the verifier's or the drafter's, between widths.

    A backend keeps its metadata by batch size, for one number of tokens a request; so do captured
    graphs. Everything else of the model runner is shared, and the backends' large buffers.

    Source: `EAGLEWorkerV2.build_adaptive_runtime_state` in
        sglang/srt/speculative/eagle_worker_v2.py builds the same pair for its numbers of steps.
    """

    def __init__(
        self,
        model_runner: ModelRunner,
        attention: Callable[[Any, int], Any] = lambda backend, width: backend,
        *,
        on_activate: Callable[[int], None] = lambda width: None,
    ) -> None:
        """Nothing is built yet.

        Args:
            model_runner: the model's.
            attention: what serves a width, given SGLang's backend for it.
            on_activate: called with a width before its graphs are captured, and its forwards run.
        """
        self._model_runner = model_runner
        self._attention = attention
        self._on_activate = on_activate
        self._runners: dict[int, Runner] = {}
        self._block_size = get_spec().speculative_num_draft_tokens

    def adopt_block(self) -> None:
        """Take over the block's own backend and graphs; call it when SGLang has built them."""
        runner = self._model_runner
        self._runners[self._block_size] = Runner(
            runner.attn_backend, runner.decode_cuda_graph_runner
        )

    def build(self, width: int, batch_sizes: Sequence[int] | None) -> None:
        """Build what a width needs; the block's is never built again.

        Args:
            width: tokens of a request in a forward, the anchor counted.
            batch_sizes: to capture, as far as the pools hold them; None to capture nothing.
        """
        if width in self._runners:
            return
        runner, whole = self._model_runner, self._runners[self._block_size]
        get_context().override(_SOURCE, speculative_num_draft_tokens=width)
        self._on_activate(width)
        # All share SGLang's workspace, as its backend's batch sizes do: forwards follow each other.
        backend, graphs = self._attention(runner._get_attention_backend(), width), None
        if batch_sizes is not None:
            if isinstance(backend, BlockAttention):
                backend.borrow(whole.attn_backend)
            else:
                borrow_buffers(backend, whole.attn_backend)
            with _captured_batch_sizes(batch_sizes):
                graphs = DecodeCudaGraphRunner(
                    runner, attn_backend=backend, speculative_num_draft_tokens=width
                )
        self._runners[width] = Runner(backend, graphs)
        get_context().override(_SOURCE, speculative_num_draft_tokens=self._block_size)

    def captured(self, width: int) -> tuple[int, ...]:
        """Batch sizes whose graphs were captured for a width, ascending; empty for none."""
        # SGLang's eager runner, where it stands for the block's, has none.
        return tuple(getattr(self._runners[width].graph_runner, "capture_bs", ()))

    def backends(self) -> tuple[Any, ...]:
        """All attention backends."""
        return tuple(runner.attn_backend for runner in self._runners.values())

    def backend(self, width: int) -> Any:
        """The attention backend that runs verifies of this width."""
        return self._runners[width].attn_backend

    def restore(self) -> None:
        """Back to the block's own, which serves prefills."""
        self.activate(self._block_size)

    def activate(self, width: int) -> None:
        """Run the next forward at this width."""
        self._on_activate(width)
        backend, graphs = self._runners[width]
        self._model_runner.attn_backend = backend
        self._model_runner.decode_cuda_graph_runner = graphs


@contextmanager
def _captured_batch_sizes(batch_sizes: Sequence[int]) -> Iterator[None]:
    """Batch sizes that a graph runner made in here captures."""
    graph = get_exec().graph
    config = with_phase(graph.cuda_graph_config, "decode", bs=list(batch_sizes))
    with graph.override(cuda_graph_config=config):
        yield
