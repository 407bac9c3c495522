"""What the Triton ops launch at serving sizes, recorded from the launchers themselves.

The launchers of `dflash_kernels/*/kernel.py` run on fake CUDA tensors of real shapes; in place of
Triton's launch a recorder keeps the kernel, its arguments and options. So what is compiled and
counted is what would be launched, not a second list of it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from dflash_kernels.accept_filtered import kernel as accept_filtered
from dflash_kernels.accept_match import kernel as accept_match
from dflash_kernels.accept_sampled import kernel as accept_sampled
from dflash_kernels.block_verify import kernel as block_verify
from dflash_kernels.context_kv import kernel as context_kv
from dflash_kernels.draft_tail import kernel as draft_tail
from dflash_kernels.prepare_block import kernel as prepare_block
from dflash_kernels.types import Filters, LayerCaches, Proposal
from dflash_kernels.verify_bound import CLASSES
from dflash_kernels.verify_bound import kernel as verify_bound
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.jit import JITFunction

VOCABULARY = 248_320  # Qwen3.6
WIDTH = 16
LAYERS, HEADS, HEAD_DIM = 5, 8, 128  # a drafter
TOP = 20  # tokens that a sampled draft is drawn from

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


class Launch(NamedTuple):
    """One kernel as it would be launched."""

    op: str  # the op and its variant
    kernel: JITFunction
    arguments: Mapping[str, Any]  # by parameter name, compile-time constants included
    options: Mapping[str, int]  # num_warps
    grid: tuple[int, ...]

    @property
    def name(self) -> str:
        """Op, variant and kernel."""
        return f"{self.op}:{self.kernel.__name__.lstrip('_')}"


class Variant(NamedTuple):
    """An op with the options that change what is compiled."""

    name: str
    run: Callable[[int], Any]  # of the batch size, inside a fake mode
    streams: bool = False  # reads large tensors: its loads must be 16 bytes wide


def new(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor on the fake GPU."""
    return torch.empty(shape, dtype=dtype, device="cuda")


def run_prepare_block(bs: int) -> None:
    """Lay out blocks from a table of 256k tokens a request."""
    anchors, prefixes, rows = (new(bs) for _ in range(3))
    table = new(bs + 1, 1 << 18, dtype=torch.int32)
    prepare_block.prepare_block(
        anchors, prefixes, rows, table, block_size=WIDTH, mask_token_id=1000
    )


def run_accept_match(bs: int, options: bool) -> None:
    """Accept, with or without limits and exceptions."""
    drafts, verified = (new(bs, WIDTH) for _ in range(2))
    limit = new(bs, dtype=torch.int32) if options else None
    extra_accept = new(bs, WIDTH - 1, dtype=torch.bool) if options else None
    accept_match.accept_match(drafts, verified, new(bs), limit=limit, extra_accept=extra_accept)


def run_draft_tail(bs: int, dtype: torch.dtype, top: int, columns: int = VOCABULARY) -> None:
    """Tail of all drafted positions."""
    logits = new(bs * (WIDTH - 1), columns, dtype=dtype)
    draft_tail.draft_tail(logits, num_ids=columns, top=top)


def run_verify_bound(bs: int) -> None:
    """The bound of one request's verify, whatever the batch."""
    values, lse = new(WIDTH - 1, 1, dtype=FP32)[:, 0], new(WIDTH - 1, dtype=FP32)
    verify_bound.verify_bound(values, lse, new(CLASSES, dtype=FP32), new(WIDTH, dtype=FP32))


def run_verify_argmax(bs: int, dtype: torch.dtype) -> None:
    """The verifier's greedy tokens: the same kernel, at all verified positions."""
    draft_tail.draft_tail(new(bs * WIDTH, VOCABULARY, dtype=dtype), num_ids=VOCABULARY)


def run_accept_sampled(bs: int, dtype: torch.dtype) -> None:
    """Draw and accept at all verified positions."""
    logits = new(bs * WIDTH, VOCABULARY, dtype=dtype)
    temperatures = new(bs, dtype=FP32)
    accept_sampled.accept_sampled(logits, new(bs, WIDTH), new(bs), temperatures, new(bs))


def run_accept_filtered(bs: int, dtype: torch.dtype) -> None:
    """Filter, draw and accept at all verified positions."""
    logits = new(bs * WIDTH, VOCABULARY, dtype=dtype)
    filters = Filters(new(bs, dtype=torch.int32), new(bs, dtype=FP32), new(bs, dtype=FP32))
    given = logits, new(bs, WIDTH), new(bs), new(bs, dtype=FP32), new(bs)
    accept_filtered.accept_filtered(*given, filters)


def run_block_verify(bs: int, as_block: bool) -> None:
    """Accept sampled drafts by one of the two rules."""
    drafts = (bs, WIDTH - 1, TOP)
    rule = block_verify.block_verify if as_block else block_verify.token_wise
    rule(
        new(bs, WIDTH),
        Proposal(new(*drafts), new(*drafts, dtype=FP32)),
        new(bs, WIDTH, VOCABULARY, dtype=FP32),
        new(bs, WIDTH, dtype=FP32),
        new(bs),
    )


def run_context_kv(bs: int, dtype: torch.dtype, head_dim: int, rotary_dim: int) -> None:
    """Context KV of all verified positions, in buffers of 64k slots."""
    buffers = [new(1 << 16, HEADS, head_dim, dtype=dtype) for _ in range(2 * LAYERS)]
    scales = new(LAYERS, 2, dtype=FP32) if dtype == FP8 else None
    caches = LayerCaches(buffers[:LAYERS], buffers[LAYERS:], new(LAYERS, 2), scales)
    tokens = bs * WIDTH
    context_kv.context_kv(
        new(tokens, LAYERS, 2, HEADS, head_dim, dtype=BF16),
        new(LAYERS, head_dim, dtype=BF16),
        new(1 << 18, rotary_dim, dtype=FP32),
        new(tokens),
        new(tokens),
        caches,
        eps=1e-6,
        valid_lens=new(bs, dtype=torch.int32),
    )


VARIANTS = (
    Variant("prepare_block", run_prepare_block),
    Variant("accept_match", lambda bs: run_accept_match(bs, options=False)),
    Variant("accept_match(limit, extra_accept)", lambda bs: run_accept_match(bs, options=True)),
    Variant("draft_tail(bf16)", lambda bs: run_draft_tail(bs, BF16, 1), streams=True),
    Variant("draft_tail(fp32)", lambda bs: run_draft_tail(bs, FP32, 1), streams=True),
    Variant("draft_tail(bf16, top=32)", lambda bs: run_draft_tail(bs, BF16, 32), streams=True),
    Variant("verify_bound", run_verify_bound),
    Variant("accept_sampled(bf16)", lambda bs: run_accept_sampled(bs, BF16), streams=True),
    Variant("accept_sampled(fp32)", lambda bs: run_accept_sampled(bs, FP32), streams=True),
    Variant("accept_filtered(bf16)", lambda bs: run_accept_filtered(bs, BF16), streams=True),
    Variant("accept_filtered(fp32)", lambda bs: run_accept_filtered(bs, FP32), streams=True),
    Variant("block_verify", lambda bs: run_block_verify(bs, as_block=True), streams=True),
    Variant("block_verify(token_wise)", lambda bs: run_block_verify(bs, as_block=False), True),
    Variant("context_kv(bf16)", lambda bs: run_context_kv(bs, BF16, HEAD_DIM, HEAD_DIM), True),
    Variant("context_kv(fp8)", lambda bs: run_context_kv(bs, FP8, HEAD_DIM, HEAD_DIM), True),
    Variant("context_kv(256, rotary 64)", lambda bs: run_context_kv(bs, BF16, 256, 64), True),
)


@contextmanager
def _recording(op: str, launches: list[Launch]) -> Iterator[None]:
    def record(
        kernel: JITFunction, *args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any
    ) -> None:
        options = {name: kwargs.pop(name) for name in ("num_warps",) if name in kwargs}
        arguments = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        launches.append(Launch(op, kernel, arguments, options, grid))

    with mock.patch.object(JITFunction, "run", record):
        yield


def launches_of(variant: Variant, bs: int) -> list[Launch]:
    """The launches of one call of an op at a batch size."""
    launches: list[Launch] = []
    with FakeTensorMode(allow_non_fake_inputs=False), _recording(variant.name, launches):
        variant.run(bs)
    return launches
