"""What `self_test` runs: every op on random inputs of a server's shapes, beside its reference."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_kernels.accept_filtered import reference as filtered_reference
from dflash_kernels.accept_match import reference as accept_reference
from dflash_kernels.accept_sampled import reference as sampled_reference
from dflash_kernels.block_verify import reference as verify_reference
from dflash_kernels.context_kv import reference as context_reference
from dflash_kernels.draft_tail import reference as tail_reference
from dflash_kernels.prepare_block import reference as block_reference
from dflash_kernels.types import Block, Filters, LayerCaches, Proposal, ServerShapes

BATCH = 7
CONTEXT = 300
# Logits are as wide as the vocabulary, and the reference of `accept_sampled` takes ten float64
# copies of them.
ROWS = 8


class Case(NamedTuple):
    """One op on random inputs."""

    op: str
    kernel: Callable[[], Sequence[Tensor]]
    reference: Callable[[], Sequence[Tensor]]
    tolerance: float = 0.0  # of floats, relative


class Inputs:
    """Random inputs, the same on every device."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = device
        self._generator = torch.Generator().manual_seed(0)

    def ids(self, high: int, *shape: int) -> Tensor:
        """Integers below `high`, int64."""
        return torch.randint(0, high, shape, generator=self._generator).to(self.device)

    def uniforms(self, *shape: int) -> Tensor:
        """In [0, 1), float32."""
        return torch.rand(shape, generator=self._generator).to(self.device)

    def floats(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Normal noise."""
        return torch.randn(shape, generator=self._generator).to(self.device, dtype)


# Kernels are imported below, because a machine without Triton never gets this far.


def cases(device: torch.device | str, shapes: ServerShapes) -> Iterator[Case]:
    """Every op, inputs made as it comes up."""
    inputs = Inputs(device)
    yield _prepare_block(inputs, shapes)
    yield _narrow_block(inputs, shapes)
    yield _accept_match(inputs, shapes)
    yield _draft_tail(inputs, shapes)
    yield _accept_sampled(inputs, shapes)
    yield _accept_filtered(inputs, shapes)
    yield _context_kv(inputs, shapes)
    for rule in ("block_verify", "token_wise"):
        yield _rejection(rule, inputs, shapes)


def _prepare_block(inputs: Inputs, shapes: ServerShapes) -> Case:
    from dflash_kernels.prepare_block import kernel

    table = inputs.ids(2**31 - 1, BATCH + 2, CONTEXT + shapes.block_size).to(torch.int32)
    anchors, lens = inputs.ids(shapes.vocab_size, BATCH), inputs.ids(CONTEXT, BATCH)
    rows = inputs.ids(BATCH + 2, BATCH)
    sizes = {"block_size": shapes.block_size, "mask_token_id": 3}
    return Case(
        "prepare_block",
        lambda: kernel.prepare_block(anchors, lens, rows, table, **sizes),
        lambda: block_reference.prepare_block(anchors, lens, rows, table, **sizes),
    )


def _narrow_block(inputs: Inputs, shapes: ServerShapes) -> Case:
    from dflash_kernels.prepare_block import kernel

    size = (BATCH, shapes.block_size)
    block, width = Block(*(inputs.ids(9, *size) for _ in range(3))), shapes.block_size // 2
    return Case(
        "narrow_block",
        lambda: kernel.narrow_block(block, width),
        lambda: block_reference.narrow_block(block, width),
    )


def _accept_match(inputs: Inputs, shapes: ServerShapes) -> Case:
    from dflash_kernels.accept_match import kernel

    # Of two tokens, so that every accept length occurs.
    draft, target = (inputs.ids(2, BATCH, shapes.block_size) for _ in range(2))
    lens = inputs.ids(CONTEXT, BATCH)
    options: dict[str, Tensor] = {
        "limit": inputs.ids(9, BATCH).to(torch.int32),
        "extra_accept": inputs.ids(2, BATCH, shapes.block_size - 1).bool(),
    }
    return Case(
        "accept_match",
        lambda: kernel.accept_match(draft, target, lens, **options),
        lambda: accept_reference.accept_match(draft, target, lens, **options),
    )


def _draft_tail(inputs: Inputs, shapes: ServerShapes) -> Case:
    from dflash_kernels.draft_tail import kernel

    logits = inputs.floats(ROWS, shapes.vocab_size, dtype=shapes.dtype)
    num_ids, top = shapes.vocab_size, shapes.top

    def reference() -> Sequence[Tensor]:
        ids, values, lse = tail_reference.draft_tail(logits, num_ids=num_ids, top=top)
        assert lse is not None
        return ids, values, lse

    return Case(
        "draft_tail",
        lambda: kernel.draft_tail(logits, num_ids=num_ids, top=top),
        reference,
        tolerance=1e-5,  # of the normaliser, whose float32 sums have another order
    )


def _accept_sampled(inputs: Inputs, shapes: ServerShapes) -> Case:
    from dflash_kernels.accept_sampled import kernel

    given = (
        inputs.floats(ROWS, shapes.vocab_size),  # float32: SGLang's logits processor casts them
        inputs.ids(shapes.vocab_size, 2, ROWS // 2),
        inputs.ids(CONTEXT, 2),
        torch.tensor([0.0, 0.8], device=inputs.device),  # the first request is greedy
        inputs.ids(2**62, 2),
    )
    return Case(
        "accept_sampled",
        lambda: kernel.accept_sampled(*given),
        lambda: sampled_reference.accept_sampled(*given),
    )


def _accept_filtered(inputs: Inputs, shapes: ServerShapes) -> Case:
    from dflash_kernels.accept_filtered import kernel

    def each(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=inputs.device)

    given = (
        inputs.floats(ROWS, shapes.vocab_size),
        inputs.ids(shapes.vocab_size, 4, ROWS // 4),
        inputs.ids(CONTEXT, 4),
        each(0.8, 0.5, 1.0, 0.0),  # the last request is greedy
        inputs.ids(2**62, 4),
        Filters(
            top_ks=each(20, 2**30, 2**30, 1, dtype=torch.int32),
            top_ps=each(1.0, 0.9, 1.0, 1.0),
            min_ps=each(0.0, 0.0, 0.1, 0.0),
        ),
    )
    return Case(
        "accept_filtered",
        lambda: kernel.accept_filtered(*given),
        lambda: filtered_reference.accept_filtered(*given),
    )


def _context_kv(inputs: Inputs, shapes: ServerShapes) -> Case:
    from dflash_kernels.context_kv import kernel

    tokens = 2 * BATCH
    row = (shapes.kv_heads, shapes.head_dim)
    given = (
        inputs.floats(tokens, shapes.layers, 2, *row, dtype=shapes.dtype),
        inputs.floats(shapes.layers, shapes.head_dim, dtype=shapes.dtype),
        inputs.floats(CONTEXT, shapes.rotary_dim),
        inputs.ids(CONTEXT, tokens),
        torch.randperm(2 * tokens, device=inputs.device)[:tokens],
    )

    def run(op: Callable[..., None]) -> list[Tensor]:
        buffer = torch.zeros(shapes.layers, 2, 2 * tokens, *row, device=inputs.device)
        buffer = buffer.to(shapes.cache_dtype)
        op(*given, LayerCaches.of(list(buffer[:, 0]), list(buffer[:, 1])), eps=1e-6)
        return [buffer.float()]

    return Case(
        "context_kv",
        lambda: run(kernel.context_kv),
        lambda: run(context_reference.context_kv),
        # Two steps of the cache's rounding: the device's square root and division are approximate.
        tolerance=2 * (2**-3 if shapes.cache_dtype.itemsize == 1 else 2**-8),
    )


def _rejection(rule: str, inputs: Inputs, shapes: ServerShapes) -> Case:
    from dflash_kernels.block_verify import kernel

    bs, width, vocab_size = 2, shapes.block_size, shapes.vocab_size
    # Proposal and verifier agree on the ids but not on how likely they are: runs of every length.
    probs = inputs.uniforms(bs, width, vocab_size)
    likely = probs[:, :-1].topk(min(8, vocab_size), dim=2)
    proposal = Proposal(likely.indices, likely.values.softmax(dim=2))
    probs[:, :-1].scatter_(2, proposal.top_ids, vocab_size * proposal.top_probs)
    probs /= probs.sum(dim=2, keepdim=True)
    drafts = torch.cat([inputs.ids(vocab_size, bs, 1), proposal.top_ids[..., 0]], dim=1)
    given = (drafts, proposal, probs, inputs.uniforms(bs, width), inputs.ids(CONTEXT, bs))
    return Case(
        rule,
        lambda: getattr(kernel, rule)(*given),
        lambda: getattr(verify_reference, rule)(*given),
    )
