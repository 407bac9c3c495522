"""Each op of the decode step against its reference, on the device that will serve."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_kernels.accept_match import reference as accept_reference
from dflash_kernels.block_verify import Proposal
from dflash_kernels.block_verify import reference as verify_reference
from dflash_kernels.prepare_block import Block
from dflash_kernels.prepare_block import reference as block_reference

BATCH = 7
CONTEXT = 300


class OpError(RuntimeError):
    """An op does not compile on this device, or computes something else than its reference."""


class Case(NamedTuple):
    """One op on small random inputs."""

    op: str
    kernel: Callable[[], Sequence[Tensor]]
    reference: Callable[[], Sequence[Tensor]]


def self_test(device: torch.device | str, block_size: int, vocab_size: int) -> dict[str, float]:
    """Run every op once and compare.

    Args:
        device: to run on.
        block_size: of the server.
        vocab_size: ids are below it.

    Returns:
        Seconds that each op took, compilation included.

    Raises:
        OpError: with the op's name and what is wrong.
    """
    seconds = {}
    for case in _cases(device, block_size, vocab_size):
        begin = time.perf_counter()
        try:
            got = list(case.kernel())
            torch.get_device_module(device).synchronize()
        except Exception as problem:
            raise OpError(f"{case.op} does not run: {problem}") from problem
        seconds[case.op] = time.perf_counter() - begin
        expected = list(case.reference())
        wrong = [i for i, pair in enumerate(zip(got, expected, strict=True)) if not _equal(*pair)]
        if wrong:
            raise OpError(f"{case.op} differs from its reference in output {wrong[0]}")
    return seconds


def _equal(got: Tensor, expected: Tensor) -> bool:
    return got.dtype == expected.dtype and torch.equal(got, expected)


def _cases(device: torch.device | str, block_size: int, vocab_size: int) -> Iterator[Case]:
    # Here, because a machine without Triton never gets this far.
    from dflash_kernels.accept_match import kernel as accept_kernel
    from dflash_kernels.block_verify import kernel as verify_kernel
    from dflash_kernels.prepare_block import kernel as block_kernel

    generator = torch.Generator().manual_seed(0)

    def ids(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator).to(device)

    table = ids(2**31 - 1, BATCH + 2, CONTEXT + block_size).to(torch.int32)
    lens = ids(CONTEXT, BATCH)
    rows = torch.randperm(BATCH + 2, generator=generator)[:BATCH].to(device)
    anchors, sizes = ids(vocab_size, BATCH), {"block_size": block_size, "mask_token_id": 3}
    yield Case(
        "prepare_block",
        lambda: block_kernel.prepare_block(anchors, lens, rows, table, **sizes),
        lambda: block_reference.prepare_block(anchors, lens, rows, table, **sizes),
    )
    block, width = Block(*(ids(vocab_size, BATCH, block_size) for _ in range(3))), block_size // 2
    yield Case(
        "narrow_block",
        lambda: block_kernel.narrow_block(block, width),
        lambda: block_reference.narrow_block(block, width),
    )
    # Of two tokens, so that every accept length occurs.
    draft, target, limit = ids(2, BATCH, block_size), ids(2, BATCH, block_size), ids(9, BATCH)
    options: dict[str, Tensor] = {
        "limit": limit.to(torch.int32),
        "also": ids(2, BATCH, block_size - 1).bool(),
    }
    yield Case(
        "accept_match",
        lambda: accept_kernel.accept_match(draft, target, lens, **options),
        lambda: accept_reference.accept_match(draft, target, lens, **options),
    )
    # Proposal and verifier agree on the ids but not on how likely they are: runs of every length.
    probs = torch.rand(BATCH, block_size, vocab_size, generator=generator).to(device)
    likely = probs[:, :-1].topk(min(8, vocab_size), dim=2)
    proposal = Proposal(likely.indices, likely.values.softmax(dim=2))
    probs[:, :-1].scatter_(2, proposal.top_ids, vocab_size * proposal.top_probs)
    probs /= probs.sum(dim=2, keepdim=True)
    drafts = torch.cat([anchors[:, None], proposal.top_ids[..., 0]], dim=1)
    chance = torch.rand(BATCH, block_size, generator=generator).to(device)
    for rule in ("block_verify", "token_wise"):
        kernel, reference = getattr(verify_kernel, rule), getattr(verify_reference, rule)
        given = (drafts, proposal, probs, chance, lens)
        yield Case(rule, partial(kernel, *given), partial(reference, *given))
