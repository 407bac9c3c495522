"""Cases of `prepare_block`: batches and block sizes around powers of two, and where rows lie."""

from collections.abc import Iterator

import torch
from torch import Tensor

from dflash_kernels.case import Case, Inputs, Trial, far_apart
from dflash_kernels.types import ServerShapes

MASK = 999
Given = tuple[Tensor, Tensor, Tensor, Tensor]  # anchors, prefix lengths, rows, table


def layout(new: Inputs, bs: int, block_size: int, rows: int = 70, columns: int = 200) -> Given:
    """Blocks of up to `rows` requests; the longest prefix reaches the table's last column."""
    table = new.ids(2**31 - 1, rows, columns, dtype=torch.int32)
    prefix_lens = new.ids(columns - block_size + 1, bs)
    prefix_lens[:1] = columns - block_size
    return new.ids(2**40, bs), prefix_lens, new.permutation(rows)[:bs], table


def trial(given: Given, block_size: int) -> Trial:
    """Lay the blocks out."""
    sizes = {"block_size": block_size, "mask_token_id": MASK}
    return Trial(lambda op: op.prepare_block(*given, **sizes))


def of_size(bs: int, block_size: int) -> Case:
    """A batch and a block size."""
    return Case(f"{bs} x {block_size}", lambda new: trial(layout(new, bs, block_size), block_size))


def strided(new: Inputs) -> Trial:
    """Inputs are columns of other tensors, as the scheduler hands them over."""
    state = torch.tensor([[11, 3, 1], [12, 0, 0], [13, 7, 2]], device=new.device)
    table = torch.arange(60, dtype=torch.int32, device=new.device).view(3, 20)[:, :16]
    anchors, prefix_lens, rows = state.unbind(1)
    return trial((anchors, prefix_lens, rows, table), 4)


def far(new: Inputs) -> Trial:
    """Rows of a table of 2**30 columns."""
    table = far_apart(new.ids(2**31 - 1, 3, 8, dtype=torch.int32))
    return trial((new.ids(9, 1), new.each(4).long(), new.each(2).long(), table), 4)


# Sizes for the interpreter: on a GPU each would compile kernels of its own.
GRID = tuple(of_size(bs, size) for bs in (0, 1, 3, 63) for size in (1, 2, 5, 16, 17))

CASES = (
    of_size(1, 1),
    of_size(7, 16),
    of_size(65, 5),
    Case("inputs that are columns of other tensors", strided),
    Case("table rows further apart than int32 reaches", far, large=True),
)


def for_server(shapes: ServerShapes) -> Iterator[Case]:
    """At a server's widths."""

    def at(width: int) -> Case:
        columns = 300 + width
        return Case(
            f"prepare_block at width {width}",
            lambda new: trial(layout(new, 7, width, 9, columns), width),
        )

    return map(at, shapes.widths)
