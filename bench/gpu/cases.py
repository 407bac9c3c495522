"""Inputs for every op, small and large, odd and even: the kernel's result must be the reference's.

A case is run twice, with the kernel's module and with the reference's, on the same device.
"""

from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from dflash_kernels.block_verify import draw
from dflash_kernels.types import Block, Filters, LayerCaches, Proposal
from torch import Tensor

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
VOCABULARIES = (151_936, 248_320)
FAR = 1 << 30  # elements between rows: two rows on, an index has passed 2**31


class Case(NamedTuple):
    """One op on one set of inputs."""

    op: str  # folder of dflash_kernels
    name: str
    run: Callable[[ModuleType], Sequence[Tensor]]  # given kernel.py or reference.py of the op
    tolerance: float = 0.0  # of floats, relative to the larger of 1 and the reference's


class Inputs:
    """Random tensors, the same on every machine."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self._generator = torch.Generator().manual_seed(seed)

    def floats(self, *shape: int, dtype: torch.dtype = FP32, scale: float = 1.0) -> Tensor:
        """Normally distributed."""
        values = scale * torch.randn(shape, generator=self._generator)
        return values.to(dtype).to(self.device)

    def uniforms(self, *shape: int) -> Tensor:
        """In [0, 1)."""
        return torch.rand(shape, generator=self._generator).to(self.device)

    def ids(self, high: int, *shape: int, low: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
        """Integers in low .. high-1."""
        return torch.randint(low, high, shape, generator=self._generator, dtype=dtype).to(
            self.device
        )


def all_cases(device: torch.device, small: bool) -> Iterator[Case]:
    """Every case.

    Args:
        device: of the tensors.
        small: without large vocabularies and far strides: what a checker of memory accesses, or
            Triton's interpreter, gets through in seconds.
    """
    yield from blocks(device)
    yield from tails(device, small)
    yield from samples(device, small)
    yield from filtered(device, small)
    yield from verifies(device, small)
    yield from contexts(device, small)


def blocks(device: torch.device) -> Iterator[Case]:
    """prepare_block, narrow_block and accept_match."""
    for bs, width in ((1, 1), (7, 16), (65, 5)):
        new = Inputs(device, 31 * bs + width)
        table = new.ids(2**31 - 1, bs + 3, 200, dtype=torch.int32)
        rows = new.ids(bs + 3, bs)
        given = new.ids(2**40, bs), new.ids(200 - width, bs), rows, table
        sizes = {"block_size": width, "mask_token_id": 9}
        shape = f"{bs} x {width}"
        yield Case("prepare_block", shape, lambda op, g=given, s=sizes: op.prepare_block(*g, **s))
        block = Block(*(new.ids(2**40, bs, width) for _ in range(3)))
        yield Case(
            "prepare_block",
            f"narrow {shape}",
            lambda op, b=block, w=width: op.narrow_block(b, (w + 1) // 2),
        )
        pair = new.ids(2, bs, width), new.ids(2, bs, width), new.ids(2**33, bs)
        options: dict[str, Any] = {
            "limit": new.ids(width + 2, bs, low=-1, dtype=torch.int32),
            "extra_accept": new.uniforms(bs, width - 1) < 0.5,
        }
        yield Case("accept_match", shape, lambda op, p=pair: op.accept_match(*p))
        yield Case(
            "accept_match",
            f"{shape}, limit, extra_accept",
            lambda op, p=pair, o=options: op.accept_match(*p, **o),
        )


def logit_shapes(small: bool) -> Iterator[tuple[int, int, torch.dtype]]:
    """(rows, columns, dtype): every dtype, odd sizes, large vocabularies."""
    yield from ((3, 1, FP32), (2, 4095, BF16), (5, 4097, BF16), (3, 777, FP16), (4, 5000, FP32))
    if not small:
        for columns in VOCABULARIES:
            yield from ((32, columns, BF16), (15, columns, FP32))


def tails(device: torch.device, small: bool) -> Iterator[Case]:
    """draft_tail."""
    # Sums of exp in another order, and the GPU's approximate exp and log: 1e-6 each.
    close = 2e-5
    for rows, columns, dtype in logit_shapes(small):
        logits = Inputs(device, rows * columns).floats(rows, columns, dtype=dtype, scale=4.0)
        for top in (1, 20) if columns > 20 else (1,):
            num_ids = columns - columns // 50  # padding behind
            yield Case(
                "draft_tail",
                f"{rows} x {columns} {name_of(dtype)}, top {top}",
                lambda op, x=logits, n=num_ids, k=top: op.draft_tail(x, num_ids=n, top=k),
                close,
            )
    odd = torch.full((4, 300), -torch.inf, device=device)
    odd[0, 7], odd[1, 5], odd[1, 6], odd[2, 3] = torch.nan, 0.0, -0.0, -5.0
    yield Case(
        "draft_tail", "NaN, zeros, -inf", lambda op: op.draft_tail(odd, num_ids=300, top=3), close
    )
    if not small:
        far = far_rows(Inputs(device, 5).floats(3, 64, dtype=BF16))
        yield Case("draft_tail", "far rows", lambda op: op.draft_tail(far, num_ids=64), close)


def samples(device: torch.device, small: bool) -> Iterator[Case]:
    """accept_sampled: float64 decides, so every draw is equal."""
    for rows, columns, dtype in logit_shapes(small):
        width = next(w for w in (5, 4, 3, 2, 1) if rows % w == 0)
        bs = rows // width
        new = Inputs(device, rows + columns)
        logits = new.floats(rows, columns, dtype=dtype, scale=2.0)
        temperatures = 0.3 + new.uniforms(bs)
        temperatures[1::2] = 0.0  # greedy
        given = (
            logits,
            new.ids(columns, bs, width),
            new.ids(2**33, bs),
            temperatures,
            new.ids(2**62, bs, low=-(2**62)),
        )
        limit = new.ids(width + 1, bs, dtype=torch.int32)
        yield Case(
            "accept_sampled",
            f"{bs} x {width} x {columns} {name_of(dtype)}",
            lambda op, g=given, n=limit: op.accept_sampled(*g, limit=n),
        )
    new = Inputs(device, 77)
    flat = torch.zeros(40, 3000, device=device)  # noise alone decides
    rest = new.ids(3000, 10, 4), new.ids(99, 10), torch.ones(10, device=device), new.ids(9**9, 10)
    yield Case("accept_sampled", "flat logits", lambda op: op.accept_sampled(flat, *rest))


def filtered(device: torch.device, small: bool) -> Iterator[Case]:
    """accept_filtered: every kind of request in one batch, and a row with more tokens than fit."""
    shapes = [(2, 4097, BF16), (1, 777, FP16), (2, 300, FP32)]
    shapes += [] if small else [(2, columns, BF16) for columns in VOCABULARIES]
    for width, columns, dtype in shapes:
        new = Inputs(device, columns)
        filters = Filters(
            torch.tensor([20, 2**30, 2**30, 50, 2**30, 1], dtype=torch.int32, device=device),
            torch.tensor([1.0, 0.9, 1.0, 0.8, 1.0, 1.0], device=device),
            torch.tensor([0.0, 0.0, 0.1, 0.01, 0.0, 0.0], device=device),
        )
        given = filtered_inputs(new, 6, width, columns, dtype)
        yield Case(
            "accept_filtered",
            f"6 x {width} x {columns} {name_of(dtype)}",
            lambda op, g=given, f=filters: op.accept_filtered(*g, f),
        )
    flat = filtered_inputs(Inputs(device, 8), 1, 1, 9000, BF16)
    nucleus = Filters(
        torch.full((1,), 2**30, dtype=torch.int32, device=device),
        torch.full((1,), 0.97, device=device),
        torch.zeros(1, device=device),
    )
    yield Case("accept_filtered", "a flat row", lambda op: op.accept_filtered(*flat, nucleus))


def filtered_inputs(
    new: Inputs, bs: int, width: int, columns: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Logits with a few tokens that stand out."""
    logits = new.floats(bs * width, columns)
    logits[:, :: max(1, columns // 40)] += 6.0
    return (
        logits.to(dtype),
        new.ids(columns, bs, width),
        new.ids(2**33, bs),
        0.5 + new.uniforms(bs),
        new.ids(2**62, bs, low=-(2**62)),
    )


def verifies(device: torch.device, small: bool) -> Iterator[Case]:
    """block_verify and token_wise: float64 decides, so every token is equal."""
    sizes = [(3, 5, 50, 3), (1, 1, 30, 4), (9, 16, 2049, 20)]
    sizes += [] if small else [(4, 16, columns, 20) for columns in VOCABULARIES]
    for bs, width, columns, top in sizes:
        given = verify_inputs(Inputs(device, bs + columns), bs, width, columns, top)
        limit = Inputs(device, 3).ids(width + 1, bs, dtype=torch.int32)
        for rule in ("block_verify", "token_wise"):
            yield Case(
                "block_verify",
                f"{rule} {bs} x {width} x {columns}, top {top}",
                lambda op, r=rule, g=given, n=limit: getattr(op, r)(*g, limit=n),
            )


def verify_inputs(
    new: Inputs, bs: int, width: int, columns: int, top: int
) -> tuple[Tensor, Proposal, Tensor, Tensor, Tensor]:
    """Drafts from a proposal that agrees with the verifier but for a factor of two or so."""
    top_ids = new.floats(bs, width - 1, columns).topk(top, dim=2).indices
    scores = new.floats(bs, width - 1, top)
    proposal = Proposal(top_ids, scores.softmax(dim=2))
    target = 0.2 * new.floats(bs, width, columns, scale=2.0).softmax(dim=2)
    agreed = (scores + new.floats(bs, width - 1, top, scale=0.7)).softmax(dim=2)
    target[:, :-1].scatter_add_(2, top_ids, 0.8 * agreed)
    target /= target.sum(dim=2, keepdim=True)
    chance = new.uniforms(bs * (width - 1))
    choice = draw(proposal.top_probs.reshape(-1, top), chance).view(bs, width - 1, 1)
    drafts = torch.cat([new.ids(columns, bs, 1), top_ids.gather(2, choice).squeeze(2)], dim=1)
    return drafts, proposal, target, new.uniforms(bs, width), new.ids(2**33, bs)


def contexts(device: torch.device, small: bool) -> Iterator[Case]:
    """context_kv: every cache type; what is not to be written is compared as well."""
    for tokens, layers, heads, head_dim, rotary, dtype in (
        (14, 2, 2, 64, 64, FP32),
        (15, 5, 8, 128, 128, BF16),
        (21, 3, 1, 256, 64, FP16),
        (16 if small else 512, 5, 8, 128, 128, FP8),
    ):
        new = Inputs(device, tokens)
        kv = new.floats(tokens, layers, 2, heads, head_dim, dtype=BF16)
        tables = new.floats(layers, head_dim, dtype=BF16), new.floats(500, rotary)
        slots = torch.randperm(4 * tokens, generator=torch.Generator().manual_seed(1))[:tokens]
        slots[::5] = -1
        shape = 4 * tokens, layers, heads, head_dim
        place = new.ids(500, tokens), slots.to(device)
        scales = 0.5 + new.uniforms(layers, 2) if dtype == FP8 else None
        # One step of the cache's numbers, where rounding falls to the other side.
        step = {FP32: 1e-5, FP16: 2e-3, BF16: 1.6e-2, FP8: 0.13}[dtype]

        def run(
            op: ModuleType,
            kv: Tensor = kv,
            tables: tuple[Tensor, Tensor] = tables,
            place: tuple[Tensor, Tensor] = place,
            shape: tuple[int, ...] = shape,
            dtype: torch.dtype = dtype,
            scales: Tensor | None = scales,
        ) -> Sequence[Tensor]:
            caches = new_caches(shape, dtype, scales, kv.device)
            valid = (
                torch.tensor([3], dtype=torch.int32, device=kv.device) if len(kv) == 14 else None
            )
            op.context_kv(kv, *tables, *place, caches, eps=1e-6, valid_lens=valid)
            return [buffer.float() for buffer in (*caches.keys, *caches.values)]

        yield Case("context_kv", f"{tokens} tokens, {name_of(dtype)} cache", run, step)


def new_caches(
    shape: tuple[int, ...], dtype: torch.dtype, scales: Tensor | None, device: torch.device
) -> LayerCaches:
    """Caches of [slots, heads, head_dim] with a 7 everywhere."""
    slots, layers, heads, head_dim = shape
    filled = torch.full((2 * layers, slots, heads, head_dim), 7.0, device=device).to(dtype)
    return LayerCaches.of(list(filled[:layers]), list(filled[layers:]), scales)


def far_rows(rows: Tensor) -> Tensor:
    """The same rows, so far apart that 32-bit addresses do not reach."""
    count, columns = rows.shape
    memory = torch.empty((count - 1) * FAR + columns, dtype=rows.dtype, device=rows.device)
    apart = memory.as_strided((count, columns), (FAR, 1))
    apart.copy_(rows)
    return apart


def name_of(dtype: torch.dtype) -> str:
    """bfloat16 instead of torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
