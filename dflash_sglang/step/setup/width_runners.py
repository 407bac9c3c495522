"""An attention backend and CUDA graphs of a model for each width of a block."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.model_executor.runner import DecodeCudaGraphRunner
from sglang.srt.runtime_context import get_context, get_spec

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
    graphs. Everything else of the model runner is shared.

    Source: `EAGLEWorkerV2.build_adaptive_runtime_state` in
        sglang/srt/speculative/eagle_worker_v2.py builds the same pair for its numbers of steps.
    """

    def __init__(
        self,
        model_runner: ModelRunner,
        widths: tuple[int, ...],
        attention: Callable[[Any, int], Any] = lambda backend, width: backend,
        *,
        on_activate: Callable[[int], None] = lambda width: None,
    ) -> None:
        """Nothing is built yet.

        Args:
            model_runner: the model's.
            widths: tokens of a request in a forward, the anchor counted.
            attention: what serves a width, given SGLang's backend for it.
            on_activate: called with a width before its graphs are captured, and its forwards run.
        """
        self._model_runner = model_runner
        self._attention = attention
        self._on_activate = on_activate
        self._widths = widths
        self._runners: dict[int, Runner] = {}
        self._block_size = get_spec().speculative_num_draft_tokens

    def build(self, *, capture: bool) -> None:
        """Build what narrower widths need; call it when the block's own is in place."""
        runner = self._model_runner
        self._runners[self._block_size] = Runner(
            runner.attn_backend, runner.decode_cuda_graph_runner
        )
        for width in self._widths:
            if width != self._block_size:
                self._runners[width] = self._build_one(width, capture=capture)
        get_context().override(_SOURCE, speculative_num_draft_tokens=self._block_size)

    def _build_one(self, width: int, *, capture: bool) -> Runner:
        get_context().override(_SOURCE, speculative_num_draft_tokens=width)
        self._on_activate(width)
        runner = self._model_runner
        # All share SGLang's workspace, as its backend's batch sizes do: forwards follow each other.
        backend = self._attention(runner._get_attention_backend(), width)
        if not capture:
            return Runner(backend, None)
        graphs = DecodeCudaGraphRunner(
            runner, attn_backend=backend, speculative_num_draft_tokens=width
        )
        return Runner(backend, graphs)

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
