"""Build what each width of the ladder needs, as far as graphs pay and memory reaches."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from sglang.srt.runtime_context import get_exec, get_parallel
from sglang.srt.utils import get_available_gpu_memory, require_gathered_buffer

from dflash_sglang.config import Settings, WidthChoice

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from dflash_sglang.step.draft.drafter import Drafter
    from dflash_sglang.step.setup.width_runners import WidthRunners

logger = logging.getLogger(__name__)

# With less free memory than this no further width is built: prefills need some, and SGLang itself
# captures no graphs of a drafter below 1 GB.
LEAST_FREE_GB = 2.0
LEAST_FREE_DRAFT_GB = 1.0  # as SGLang's own worker has it
# A batch is padded to a captured size by at most a third of its requests, with half of the sizes.
MOST_PADDING = 4 / 3


class BuiltWidths(NamedTuple):
    """What `build_widths` has made ready beside the block's own width."""

    # Largest batch size at which a width is on offer, of those that are not at any; 0 for a width
    # that was left out.
    largest_batch: dict[int, int]
    memory_gb: float  # what all of them took
    seconds: float


def free_memory_gb(model_runner: ModelRunner) -> float:
    """Free memory of the device, in GB: the least of all ranks, so that all decide alike."""
    group = get_parallel().tp_group
    return float(
        get_available_gpu_memory(
            model_runner.device,
            model_runner.gpu_id,
            distributed=group.world_size > 1,
            cpu_group=group.cpu_group,
        )
    )


def without_gathers(settings: Settings) -> Settings:
    """One width where ranks exchange tokens: steps measured at start have none of other ranks.

    There, as with --moe-a2a-backend, a forward needs a number of tokens that the ranks can divide
    and the numbers of the other ranks, which only the scheduler agrees on.
    """
    if settings.width is WidthChoice.FIXED or not require_gathered_buffer():
        return settings
    logger.warning(
        "DFLASH verifies at one width: with --moe-a2a-backend or --moe-dense-tp-size steps cannot "
        "be measured at start."
    )
    return dataclasses.replace(settings, width=WidthChoice.FIXED)


def build_widths(
    ladder: Sequence[int],
    drafter: Drafter,
    runners: WidthRunners,
    *,
    block_size: int,
    narrow_max_bs: int,
    free_gb: Callable[[], float],
) -> BuiltWidths:
    """Build all widths of a ladder but the block's, and say how far they reach.

    The widest width has graphs of all batch sizes that the block has, plain decoding of fewer, and
    the widths between them of those up to `narrow_max_bs`. The widest is built whatever memory
    there is, then plain decoding, which a useless drafter falls back to. Where nothing is captured,
    as on a CPU, a width takes next to nothing, and all are built.

    Args:
        ladder: ascending.
        drafter: whose block is ready.
        runners: of the verifier, likewise.
        block_size: tokens of a block, the anchor counted.
        narrow_max_bs: the largest batch size of graphs of the widths between.
        free_gb: free memory, the same on all ranks.
    """
    whole = runners.captured(block_size)
    largest_batch: dict[int, int] = {}
    first, begin = free_gb(), time.perf_counter()
    free = first
    for width in building_order(ladder):
        if width == block_size:
            continue
        if whole and width != ladder[-1] and free < LEAST_FREE_GB:
            largest_batch[width] = 0
            continue
        sizes = None
        if whole:
            sizes = list(whole)
            if width != ladder[-1]:
                sizes = few_batch_sizes(whole, whole[-1] if width == 1 else narrow_max_bs)
            if not sizes or sizes[-1] < whole[-1]:
                largest_batch[width] = sizes[-1] if sizes else 0
            if not sizes:
                continue
        free = _build(width, drafter, runners, sizes, free, free_gb)
    left_out = [width for width, batch_size in largest_batch.items() if batch_size == 0]
    if left_out and free < LEAST_FREE_GB:
        logger.warning(
            "DFLASH leaves out the widths %s: %.2f GB of memory are free, and %.0f GB are kept. "
            "Lower --mem-fraction-static, or give fewer widths in the settings file.",
            ", ".join(map(str, sorted(left_out))),
            free,
            LEAST_FREE_GB,
        )
    return BuiltWidths(largest_batch, max(0.0, first - free), time.perf_counter() - begin)


def building_order(ladder: Sequence[int]) -> Iterator[int]:
    """The widths by how much a server without them would lose."""
    yield ladder[-1]
    yield from ladder[:-1]


def few_batch_sizes(captured: Sequence[int], largest: int) -> list[int]:
    """Batch sizes that pad a batch little enough, about half as many as SGLang has for a block.

    Args:
        captured: batch sizes of the block's graphs, ascending.
        largest: no batch size is larger.

    Returns:
        Some of `captured`, ascending; all up to `largest` where SGLang pads no batch.
    """
    offered = [size for size in captured if size <= largest]
    if get_exec().graph.disable_cuda_graph_padding or not offered:
        return offered
    kept = offered[-1:]
    while smaller := [size for size in offered if size < kept[0]]:
        # Behind one of these, the batch that is larger by one is padded little enough.
        near = [size for size in smaller if kept[0] <= MOST_PADDING * (size + 1)]
        kept.insert(0, min(near, default=smaller[-1]))
    return kept


def _build(
    width: int,
    drafter: Drafter,
    runners: WidthRunners,
    sizes: Sequence[int] | None,
    free: float,
    free_gb: Callable[[], float],
) -> float:
    """Build one width; returns the free memory behind it, in GB."""
    begin = time.perf_counter()
    if width > 1:
        drafter.build(width, sizes)
    runners.build(width, sizes)
    left = free_gb()
    logger.info(
        "DFLASH width %d: %.2f GB and %.1f s%s; %.2f GB are free.",
        width,
        max(0.0, free - left),
        time.perf_counter() - begin,
        "" if sizes is None else f" for graphs of batch sizes {', '.join(map(str, sizes))}",
        left,
    )
    return left
