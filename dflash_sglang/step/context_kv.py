"""Context injection: the verifier's hidden states become keys and values of the drafter."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from dflash_kernels.context_kv import context_kv
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.speculative.spec_utils import draft_tp_context
from torch import Tensor

from dflash_sglang.step.setup.layer_stack import LayerStack, stack_layers, stack_problem

if TYPE_CHECKING:
    from sglang.srt.configs.draft_parallel import DraftParallelLayout
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

MAX_WAITING = 32  # steps


class Chunk(NamedTuple):
    """Tokens whose keys and values have not been written yet."""

    features: Tensor  # [tokens, taps * hidden]
    slots: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64


class ContextKV:
    """Writes the drafter's KV cache for tokens whose features the verifier has just computed.

    The drafter's pool is indexed by the verifier's slots, so a prefix found in the radix tree
    brings both.
    """

    def __init__(self, draft_runner: ModelRunner, layout: DraftParallelLayout) -> None:
        self._runner = draft_runner
        self._model = draft_runner.model
        self._layout = layout
        self._waiting: list[Chunk] = []
        self._owners: list[Req] = []  # of the tokens that wait
        self._one_by_one = True
        self._stack: LayerStack | None = None

    def bind(self) -> None:
        """Choose how to write, once the drafter's pool is allocated."""
        pool = self._runner.token_to_kv_pool
        problem = stack_problem(self._model, pool)
        self._one_by_one = problem is not None
        if problem is None:
            self._stack = stack_layers(self._model, pool)
        logger.info(
            "DFLASH writes the drafter's context KV %s.",
            "in all layers at once" if problem is None else f"layer by layer: {problem}",
        )

    def weights_change(self) -> None:
        """The drafter's weights are about to be replaced: what was made of them is out of date."""
        self._stack = None

    def append_later(
        self, features: Tensor, slots: Tensor, positions: Tensor, requests: Sequence[Req]
    ) -> None:
        """As `append`, but deferred until a draft reads the cache or `MAX_WAITING` steps wait.

        For steps that draft nothing: their tokens are few, and projecting them one step at a time
        costs more in launches than in work.

        Of the tokens that wait no two share a slot: `context_kv` writes them in any order. A slot
        changes hands only when its request leaves the running ones, finished, aborted or retracted;
        then the next step has other requests, and writes what waits before its own tokens are
        added. Nothing is asked of the device, and the scheduler need not tell of a retraction.

        Args:
            features: as in `append`.
            slots: as in `append`.
            positions: as in `append`.
            requests: whose tokens these are, as in the batch.
        """
        if self._owners != requests:
            self.flush()
            self._owners = list(requests)  # SGLang appends to the batch's list in place
        # A captured graph overwrites its outputs.
        self._waiting.append(Chunk(features.clone(), slots, positions))
        if len(self._waiting) == MAX_WAITING:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        self._owners = []
        if self._waiting:
            features, slots, positions = map(torch.cat, zip(*self._waiting, strict=True))
            self._waiting.clear()
            self._write(features, slots, positions)

    def append(self, features: Tensor, slots: Tensor, positions: Tensor) -> None:
        """Project `features` and write every drafter layer's keys and values.

        After a verify all `width` rows of a request are written, rejected ones too: what lies at or
        past the committed length is overwritten by the next block before anything reads it, and so
        needs no mask.

        Args:
            features: [tokens, taps * hidden], the tapped layers of the verifier, concatenated.
            slots: [tokens] int64, ids in the drafter's pool.
            positions: [tokens] int64, absolute.
        """
        self.flush()
        self._write(features, slots, positions)

    @torch.inference_mode()
    def _write(self, features: Tensor, slots: Tensor, positions: Tensor) -> None:
        with draft_tp_context(self._layout):
            context = self._model.project_target_hidden(features)  # [tokens, hidden]
            if self._one_by_one:
                self._write_one_by_one(context, slots, positions)
            else:
                self._write_all(context, slots, positions)

    def _write_all(self, context: Tensor, slots: Tensor, positions: Tensor) -> None:
        if self._stack is None:  # the weights have changed
            self._stack = stack_layers(self._model, self._runner.token_to_kv_pool)
        stack = self._stack
        kv = stack.method.apply(stack, context, stack.bias)
        context_kv(
            kv.view(-1, *stack.shape),
            stack.norm_weights,
            stack.rotary.cos_sin_cache,  # SGLang may replace it by a longer one
            positions,
            slots,
            stack.caches,
            eps=stack.eps,
        )

    def _write_one_by_one(self, context: Tensor, slots: Tensor, positions: Tensor) -> None:
        pool = self._runner.token_to_kv_pool
        for layer in self._model.layers:
            attention = layer.self_attn
            hidden = self._model.prepare_context_hidden_for_kv(layer, context)
            keys, values = attention.kv_proj_only(hidden)
            keys = attention.apply_k_rope(positions, attention.apply_k_norm(keys))
            pool.set_kv_buffer(
                attention.attn,
                KVWriteLoc(slots, physical=True),
                keys.view(-1, attention.num_kv_heads, attention.head_dim),
                values.view(-1, attention.num_kv_heads, attention.head_dim),
                attention.attn.k_scale,
                attention.attn.v_scale,
            )
