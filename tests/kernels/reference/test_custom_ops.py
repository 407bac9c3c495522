"""The public ops on CUDA tensors, without a GPU: fake tensors stand in, nothing is launched.

What a CUDA-graph capture needs: on a CUDA tensor a public op is exactly one custom op, which reads
nothing back to the host, and whose shapes and dtypes are known without running it and equal the
reference's.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from dflash_kernels.accept_filtered import accept_filtered
from dflash_kernels.accept_match import accept_match
from dflash_kernels.accept_sampled import accept_sampled
from dflash_kernels.block_verify import block_verify, token_wise
from dflash_kernels.context_kv import context_kv
from dflash_kernels.dispatch import launch_op
from dflash_kernels.draft_tail import draft_tail
from dflash_kernels.prepare_block import prepare_block
from dflash_kernels.types import Filters, LayerCaches, Proposal
from dflash_kernels.verify_bound import CLASSES, verify_bound
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


def integers(device: str, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def floats(device: str, *shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bfloat16, device=device)


def run_prepare_block(device: str, bs: int) -> Any:
    table = integers(device, 9, 64, dtype=torch.int32)
    anchors, prefixes, rows = (integers(device, bs) for _ in range(3))
    return prepare_block(anchors, prefixes, rows, table, block_size=16, mask_token_id=7)


def run_accept_match(device: str, bs: int) -> Any:
    drafts, verified = (integers(device, bs, 16) for _ in range(2))
    return accept_match(drafts, verified, integers(device, bs))


def run_accept_match_with_options(device: str, bs: int) -> Any:
    drafts, verified = (integers(device, bs, 16) for _ in range(2))
    return accept_match(
        drafts,
        verified,
        integers(device, bs),
        limit=integers(device, bs, dtype=torch.int32),
        extra_accept=integers(device, bs, 15, dtype=torch.bool),
    )


def run_draft_tail(device: str, bs: int) -> Any:
    return draft_tail(floats(device, bs * 15, 100), num_ids=90, top=3)


def run_accept_sampled(device: str, bs: int) -> Any:
    return accept_sampled(
        floats(device, bs * 16, 100),
        integers(device, bs, 16),
        integers(device, bs),
        torch.ones(bs, device=device),
        integers(device, bs),
    )


def run_accept_filtered(device: str, bs: int) -> Any:
    ones = torch.ones(bs, device=device)
    return accept_filtered(
        floats(device, bs * 16, 100),
        integers(device, bs, 16),
        integers(device, bs),
        ones,
        integers(device, bs),
        Filters(integers(device, bs, dtype=torch.int32), ones, ones),
    )


def run_block_verify(device: str, bs: int, rule: Callable[..., Any] = block_verify) -> Any:
    drafts = (bs, 15, 3)
    top_probs = torch.full(drafts, 1 / 3, device=device)
    return rule(
        integers(device, bs, 16),
        Proposal(integers(device, *drafts), top_probs),
        torch.full((bs, 16, 100), 0.01, device=device),
        torch.ones(bs, 16, device=device),
        integers(device, bs),
    )


def run_token_wise(device: str, bs: int) -> Any:
    return run_block_verify(device, bs, token_wise)


class Bound(NamedTuple):
    out: Tensor


def run_verify_bound(device: str, bs: int) -> Bound:
    values, lse, acceptance, prices = (
        torch.zeros(size, device=device) for size in (bs, bs, CLASSES, bs + 1)
    )
    return Bound(verify_bound(values, lse, acceptance, prices))


def run_context_kv(device: str, bs: int) -> Any:
    buffers = [floats(device, 8, 2, 64) for _ in range(6)]
    # Built by hand: fake tensors have no addresses.
    caches = LayerCaches(buffers[:3], buffers[3:], integers(device, 3, 2), None)
    context_kv(
        floats(device, bs * 16, 3, 2, 2, 64),
        floats(device, 3, 64),
        floats(device, 99, 64),
        integers(device, bs * 16),
        integers(device, bs * 16),
        caches,
        eps=1e-6,
        valid_lens=integers(device, bs, dtype=torch.int32),
    )


class Case(NamedTuple):
    run: Callable[[str, int], Any]
    op: str


CASES = [
    Case(run_prepare_block, "dflash.prepare_block.default"),
    Case(run_accept_match, "dflash.accept_match.default"),
    Case(run_accept_match_with_options, "dflash.accept_match.default"),
    Case(run_draft_tail, "dflash.draft_tail.default"),
    Case(run_accept_sampled, "dflash.accept_sampled.default"),
    Case(run_accept_filtered, "dflash.accept_filtered.default"),
    Case(run_block_verify, "dflash.block_verify.default"),
    Case(run_token_wise, "dflash.block_verify.default"),
    Case(run_verify_bound, "dflash.verify_bound.default"),
    Case(run_context_kv, "dflash.context_kv.default"),  # last: it returns nothing
]


class Recorder(TorchDispatchMode):
    """Lists the ops that are dispatched, but for those that make inputs or ask for a device."""

    IGNORED = frozenset(
        {
            "aten.zeros.default",
            "aten.ones.default",
            "aten.full.default",
            "prim.device.default",
        }
    )

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if str(func) not in self.IGNORED:
            self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("bs", [1, 4, 64])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.run.__name__)
def test_a_cuda_call_is_one_custom_op(case: Case, bs: int) -> None:
    with FakeTensorMode(allow_non_fake_inputs=False), Recorder() as recorder:
        case.run("cuda", bs)
    assert recorder.ops == [case.op]


@pytest.mark.parametrize("bs", [0, 1, 5])
@pytest.mark.parametrize("case", CASES[:-1], ids=lambda case: case.run.__name__)
def test_fake_results_have_the_references_shapes(case: Case, bs: int) -> None:
    with FakeTensorMode(allow_non_fake_inputs=False):
        fakes = case.run("cuda", bs)
    real = case.run("cpu", bs)
    assert type(fakes) is type(real)
    for name, fake, tensor in zip(real._fields, fakes, real, strict=True):
        assert (fake.shape, fake.dtype) == (tensor.shape, tensor.dtype), name
        assert fake.device.type == "cuda"


def test_context_kv_is_known_to_write_every_buffer() -> None:
    # Otherwise a graph compiler may drop the call, or move a read before it.
    importlib.import_module("dflash_kernels.context_kv.kernel")  # registers it
    assert torch.ops.dflash.context_kv.default._schema.is_mutable
    written = [
        argument.name
        for argument in torch.ops.dflash.context_kv.default._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    assert written == ["keys", "values"]


def test_tensors_with_data_go_past_the_dispatcher() -> None:
    # Its wrappers take the host about 10 us a launch, several times a step.
    def twice(x: Tensor, times: int) -> Tensor:
        return torch.full_like(x, times)

    op = launch_op("dflash_test::twice")(twice)
    op.register_fake(lambda x, times: torch.empty_like(x))
    with Recorder() as recorder:
        real = op(torch.ones(3), 2)
    assert recorder.ops == ["aten.full_like.default"]
    assert real.tolist() == [2.0, 2.0, 2.0]
    with FakeTensorMode(), Recorder() as recorder:
        assert op(torch.ones(3), 2).shape == (3,)
    assert recorder.ops == ["dflash_test.twice.default"]
