"""A drafted block's attention through FlashInfer, eager and in a replayed graph, against torch."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from dflash_kernels.case import BF16, Inputs
from torch import Tensor

from dflash_sglang.core.draft_attention import (
    AttentionWindow,
    PagedLayout,
    Shape,
    paged_layout,
    plan,
)
from dflash_sglang.drafter.reference import visibility

BLOCK, HEADS, KV_HEADS, HEAD_DIM = 16, 32, 4, 128
PAGES = 512
SHAPE = Shape(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5, 0.0, BF16, BF16)
WINDOWS = (
    AttentionWindow(-1, causal=False),
    AttentionWindow(99, causal=True),
    AttentionWindow(99, causal=False),
)
# A bfloat16 output of about 1 (2**-8), and weights that the kernel rounds to bfloat16.
TOLERANCE = 2e-2

CAPTURED = (40, 0, 7)  # committed lengths at the capture
REPLAYED = (300, 98, 1)  # at the replay

MakeWrapper = Callable[..., Any]  # arguments of flashinfer.BatchPrefillWithPagedKVCacheWrapper
Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]  # makes a call replayable


class Attended(NamedTuple):
    """How far one way of attending is from torch."""

    case: str
    error: float


class Setting(NamedTuple):
    """Queries, a paged cache and the pages of every request."""

    q: Tensor  # [bs * BLOCK, HEADS, HEAD_DIM]
    cache: Tensor  # [pages, 2, page_size, KV_HEADS, HEAD_DIM]
    tables: Tensor  # [bs, pages a request] int32, shuffled


def new_setting(device: torch.device, page_size: int) -> Setting:
    """Random contents."""
    new, bs = Inputs(device, page_size), len(CAPTURED)
    pages = PAGES * bs // page_size
    shuffled = torch.randperm(pages, generator=torch.Generator().manual_seed(1))
    return Setting(
        new.floats(bs * BLOCK, HEADS, HEAD_DIM, dtype=BF16),
        new.floats(pages, 2, page_size, KV_HEADS, HEAD_DIM, dtype=BF16),
        shuffled.to(torch.int32).view(bs, -1).to(device),
    )


def compare_all(
    device: torch.device, make_wrapper: MakeWrapper, capture: Capture
) -> Iterator[Attended]:
    """Every window and page size.

    Args:
        device: of the tensors.
        make_wrapper: FlashInfer's class, or what stands in for it.
        capture: records a call into a graph and returns its replay.
    """
    for page_size in (1, 16):
        setting = new_setting(device, page_size)
        for window in WINDOWS:
            name = (
                f"{'causal' if window.causal else 'non-causal'}, window_left {window.window_left}"
            )
            name += f", pages of {page_size}"
            expected = attend_in_torch(setting, REPLAYED, window, page_size)
            eager = run_eagerly(make_wrapper, setting, REPLAYED, window, page_size)
            yield Attended(f"{name}, eager", worst(eager, expected))
            replayed = run_replayed(make_wrapper, capture, setting, window, page_size)
            yield Attended(f"{name}, replayed", worst(replayed, expected))


def worst(got: Tensor, expected: Tensor) -> float:
    """The largest difference; NaN where a NaN is."""
    return float((got.float() - expected).abs().max())


def run_eagerly(
    make_wrapper: MakeWrapper,
    setting: Setting,
    lengths: tuple[int, ...],
    window: AttentionWindow,
    page_size: int,
) -> Tensor:
    """Plan and run without a graph."""
    wrapper = make_wrapper(new_workspace(setting), "NHD", backend="fa2")
    layout = paged_layout(torch.tensor(lengths), BLOCK, window, page_size)
    plan(wrapper, layout, pages_of(setting, layout, page_size), window, SHAPE, page_size)
    out: Tensor = wrapper.run(setting.q, setting.cache, out=torch.empty_like(setting.q))
    return out


def run_replayed(
    make_wrapper: MakeWrapper,
    capture: Capture,
    setting: Setting,
    window: AttentionWindow,
    page_size: int,
) -> Tensor:
    """Capture at one batch of lengths, plan another, replay: as the draft graph does."""
    device, bs = setting.q.device, len(CAPTURED)

    def new(size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, device=device)

    indices = new(setting.tables.numel())
    wrapper = make_wrapper(
        new_workspace(setting),
        "NHD",
        use_cuda_graph=True,
        backend="fa2",
        qo_indptr_buf=new(bs + 1),
        paged_kv_indptr_buf=new(bs + 1),
        paged_kv_indices_buf=indices,
        paged_kv_last_page_len_buf=new(bs),
    )

    def replan(lengths: tuple[int, ...]) -> None:
        layout = paged_layout(torch.tensor(lengths), BLOCK, window, page_size)
        pages = pages_of(setting, layout, page_size)
        indices[: len(pages)] = pages
        plan(wrapper, layout, indices[:0], window, SHAPE, page_size)

    out = torch.empty_like(setting.q)
    replan(CAPTURED)
    replay = capture(lambda: wrapper.run(setting.q, setting.cache, out=out))
    replan(REPLAYED)
    out.fill_(torch.nan)
    return replay()


def new_workspace(setting: Setting) -> Tensor:
    """What FlashInfer recommends."""
    return torch.zeros(128 << 20, dtype=torch.uint8, device=setting.q.device)


def pages_of(setting: Setting, layout: PagedLayout, page_size: int) -> Tensor:
    """The pages that a layout reads, one request after another."""
    first, count = layout.starts // page_size, layout.kv_indptr.diff()
    spans = zip(setting.tables, first.tolist(), count.tolist(), strict=True)
    return torch.cat([table[at : at + n] for table, at, n in spans])


def attend_in_torch(
    setting: Setting, lengths: tuple[int, ...], window: AttentionWindow, page_size: int
) -> Tensor:
    """By the reference drafter's definition, in float32, [bs * BLOCK, HEADS, HEAD_DIM]."""
    reach = None if window.window_left < 0 else window.window_left + 1
    outs = []
    for row, prefix in enumerate(lengths):
        context, block = torch.arange(prefix), prefix + torch.arange(BLOCK)
        seen = visibility(block[None], context[None], None, window=reach, causal=window.causal)
        keys, values = keys_and_values(setting, row, prefix + BLOCK, page_size)
        out = torch.nn.functional.scaled_dot_product_attention(
            setting.q[row * BLOCK : (row + 1) * BLOCK].float().transpose(0, 1),
            keys.transpose(0, 1),
            values.transpose(0, 1),
            attn_mask=seen[0].to(setting.q.device),
            scale=SHAPE.scale,
            enable_gqa=True,
        )
        outs.append(out.transpose(0, 1))
    return torch.cat(outs)


def keys_and_values(
    setting: Setting, row: int, length: int, page_size: int
) -> tuple[Tensor, Tensor]:
    """A request's keys and values by position, [length, KV_HEADS, HEAD_DIM] float32 each."""
    pages = setting.tables[row, : -(-length // page_size)].to(torch.int64)
    keys, values = setting.cache[pages].float().unbind(1)  # [pages, page_size, KV_HEADS, HEAD_DIM]
    return keys.flatten(0, 1)[:length], values.flatten(0, 1)[:length]
