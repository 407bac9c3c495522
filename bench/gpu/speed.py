"""Time per launch and achieved bandwidth of every op at serving sizes, on the GPU that is there."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from dflash_kernels.accept_filtered import accept_filtered
from dflash_kernels.accept_match import accept_match
from dflash_kernels.accept_sampled import accept_sampled
from dflash_kernels.block_verify import block_verify, token_wise
from dflash_kernels.case import BF16, Inputs
from dflash_kernels.context_kv import context_kv
from dflash_kernels.draft_tail import draft_tail
from dflash_kernels.prepare_block import prepare_block
from dflash_kernels.types import FP8, Block, Filters, LayerCaches, Proposal
from dflash_kernels.verify_bound import CLASSES, verify_bound
from torch import Tensor

WIDTH, LAYERS, HEADS, HEAD_DIM, TOP = 16, 5, 8, 128, 20
REPEATS = 30
GRAPHED = 10  # calls in one captured graph
COPIED = 1 << 30  # bytes
CACHE = 1 << 28  # bytes written between timed calls: more than any L2 holds


class Call(NamedTuple):
    """One op with everything it needs."""

    op: str
    run: Callable[[], Sequence[Tensor]]  # the result, or the buffers that are written
    given: Tensor  # an input: reversed along the batch it gives another result
    moved: int | None = None  # bytes it must move, where memory is what bounds it


class Timed(NamedTuple):
    """One op at one batch size."""

    op: str
    batch: int
    eager_us: float  # median, a call from Python: what the host adds shows in small ops
    spread_us: tuple[float, float]  # tenth and ninetieth percentile
    graph_us: float  # median, a call inside a replayed graph
    gb_per_s: float | None  # of what must be moved, in the graph
    of_copy: float | None  # the same as a share of the measured copy


def serving_calls(device: torch.device, bs: int, vocabulary: int) -> Iterator[Call]:
    """Every op at a batch size."""
    yield from step_calls(device, bs)
    yield from logit_calls(device, bs, vocabulary)
    yield from verify_calls(device, bs, vocabulary)
    yield from context_calls(device, bs)


def step_calls(device: torch.device, bs: int) -> Iterator[Call]:
    """What lays out and accepts a block."""
    new = Inputs(device, bs)
    positions, rows = new.ids(1000, bs), torch.arange(bs, device=device)
    table = new.ids(2**31 - 1, bs, 2048, dtype=torch.int32)

    def lay_out() -> Block:
        return prepare_block(positions, positions, rows, table, block_size=WIDTH, mask_token_id=7)

    yield Call("prepare_block", lay_out, positions)
    ids, others = new.ids(2, bs, WIDTH), new.ids(2, bs, WIDTH)
    yield Call("accept_match", lambda: accept_match(ids, others, positions), ids)
    # Of one request, whatever the batch.
    drafts = WIDTH - 1
    logits, lse = new.floats(drafts), new.floats(drafts)
    acceptance, prices = torch.rand(CLASSES, device=device), torch.rand(WIDTH, device=device)
    bound = partial(verify_bound, logits, lse, acceptance, prices)
    yield Call("verify_bound", lambda: [bound()], logits)


def logit_calls(device: torch.device, bs: int, vocabulary: int) -> Iterator[Call]:
    """What reads the heads' logits once."""
    new = Inputs(device, bs)
    logits = torch.randn(bs * WIDTH, vocabulary, device=device, dtype=BF16)
    size = logits.numel() * logits.element_size()

    def tail(top: int) -> list[Tensor]:
        ids, values, lse = draft_tail(logits, num_ids=vocabulary, top=top)
        assert lse is not None
        return [ids, values, lse]

    yield Call("draft_tail, top 1", lambda: tail(1), logits, size)
    yield Call(f"draft_tail, top {TOP}", lambda: tail(TOP), logits, size)
    given = new.ids(2, bs, WIDTH), new.ids(99, bs), torch.ones(bs, device=device), new.ids(9, bs)
    yield Call("accept_sampled", lambda: accept_sampled(logits, *given), logits, size)
    ones = torch.ones(bs, device=device)
    nucleus = Filters(
        torch.full((bs,), TOP, dtype=torch.int32, device=device), 0.95 * ones, 0 * ones
    )
    yield Call("accept_filtered", lambda: accept_filtered(logits, *given, nucleus), logits, size)


def verify_calls(device: torch.device, bs: int, vocabulary: int) -> Iterator[Call]:
    """The rules for sampled drafts: one row of probabilities a request."""
    probs = torch.randn(bs, WIDTH, vocabulary, device=device).softmax(dim=2)
    likely = probs[:, :-1].topk(TOP, dim=2)
    proposal = Proposal(likely.indices, likely.values.softmax(dim=2))
    lens = torch.arange(bs, device=device)
    drafts = torch.cat([lens[:, None], proposal.top_ids[..., 0]], dim=1)
    given = drafts, proposal, probs, torch.rand(bs, WIDTH, device=device), lens
    moved = bs * (vocabulary * 4 + (WIDTH - 1) * TOP * 16)
    yield Call("block_verify", lambda: block_verify(*given), given[3], moved)
    yield Call("token_wise", lambda: token_wise(*given), given[3], moved)


def context_calls(device: torch.device, bs: int) -> Iterator[Call]:
    """Context KV of the verified positions, in both cache types."""
    tokens, new = bs * WIDTH, Inputs(device, bs)
    kv = new.floats(tokens, LAYERS, 2, HEADS, HEAD_DIM, dtype=BF16)
    norm, cos_sin = new.floats(LAYERS, HEAD_DIM, dtype=BF16), new.floats(2048, HEAD_DIM)
    positions, slots = new.ids(2048, tokens), torch.randperm(4 * tokens, device=device)[:tokens]

    def write(caches: LayerCaches) -> list[Tensor]:
        context_kv(kv, norm, cos_sin, positions, slots, caches, eps=1e-6)
        return [*caches.keys, *caches.values]

    for dtype in (BF16, FP8):
        scales = torch.ones(LAYERS, 2, device=device) if dtype == FP8 else None
        buffers = torch.zeros(2 * LAYERS, 4 * tokens, HEADS, HEAD_DIM, device=device).to(dtype)
        caches = LayerCaches.of(list(buffers[:LAYERS]), list(buffers[LAYERS:]), scales)
        name, moved = f"context_kv, {dtype.itemsize}-byte cache", kv.numel() * (2 + dtype.itemsize)
        yield Call(name, partial(write, caches), kv, moved)


def time_call(call: Call, bs: int, copy_gb_per_s: float) -> Timed:
    """Time one op with events on the device."""
    cache = torch.empty(CACHE, dtype=torch.uint8, device="cuda")
    eager = sorted(event_times(call.run, cache))
    graph = captured([call.run] * GRAPHED)
    replayed = statistics.median(event_times(graph.replay, cache)) / GRAPHED
    rate = None if call.moved is None else call.moved / replayed / 1e3
    return Timed(
        op=call.op,
        batch=bs,
        eager_us=round(statistics.median(eager), 2),
        spread_us=(round(eager[len(eager) // 10], 2), round(eager[-len(eager) // 10], 2)),
        graph_us=round(replayed, 2),
        gb_per_s=None if rate is None else round(rate, 1),
        of_copy=None if rate is None else round(rate / copy_gb_per_s, 3),
    )


def event_times(run: Callable[[], object], cache: Tensor) -> list[float]:
    """Microseconds of repeated calls, each with a cold L2."""
    for _ in range(3):
        run()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cache.zero_()
        begin.record()
        run()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return [1e3 * begin.elapsed_time(end) for begin, end in times]


def captured(calls: list[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """A graph of calls, warmed up on a stream of its own as a capture needs it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def copy_bandwidth() -> float:
    """GB/s of a large copy on the device, read and write counted: what an op is compared with."""
    source, target = (torch.zeros(COPIED, dtype=torch.uint8, device="cuda") for _ in range(2))
    small = torch.empty(1, dtype=torch.uint8, device="cuda")
    return 2 * COPIED / statistics.median(event_times(lambda: target.copy_(source), small)) / 1e3


def smallest(device: torch.device) -> list[str]:
    """Run every call once on a small vocabulary, untimed: the names of what would be timed."""
    names = []
    for call in serving_calls(device, 2, 500):
        call.run()
        names.append(call.op)
    return names
