"""Bytes of GPU memory that one verify's sampling and accepting moves: this package's and SGLang's.

Counted without a GPU, from the head's bfloat16 logits to the accepted tokens. Ours: every tensor of
every recorded launch, once; a test counts the loads and stores of the interpreted kernels and finds
1 % more at most. SGLang's: its own functions run on fake tensors, and every op reads its inputs and
writes its outputs; kernels that read their input several times do so as often as `PASSES` says, or,
for a lower bound that rests on no assumption, once. "Ordinary" is SGLang's ordinary sampler, which
draws rows with filters where `accept_filtered` does not. Nothing here is a time.
"""

import contextlib
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from sglang.srt.layers import sampler as sampler_module
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.speculative import dflash_utils
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.kernels.byte_counter import PASSES, ByteCounter, physical_bytes
from bench.kernels.launches import (
    BF16,
    FP32,
    VOCABULARY,
    WIDTH,
    Variant,
    launches_of,
    new,
    run_accept_filtered,
    run_accept_match,
    run_accept_sampled,
    run_verify_argmax,
)

BATCHES = (1, 8, 64)
FILTERED = ("top_p", "top_k", "top_k+top_p")
FILTERS = ("greedy", "none", *FILTERED)


class Row(NamedTuple):
    """Bytes of one path at one batch size."""

    path: str  # ours, sglang, ordinary; (single reads): each of SGLang's kernels reads once
    batch: int
    filters: str  # greedy, none, or what the requests filter by
    bytes: int
    floor: int  # one read of the head's bfloat16 logits
    ratio: float  # bytes / floor


def count_all() -> list[Row]:
    """Every path, batch and filter."""
    rows = []
    for filters in FILTERS:
        for batch in BATCHES:
            counted = {
                "sglang": count_sglang(batch, filters, PASSES),
                "sglang (single reads)": count_sglang(batch, filters, {}),
            }
            counted["ours"] = count_ours(batch, filters)
            if filters in FILTERED:
                counted["ordinary"] = count_ordinary(batch, filters, PASSES)
                counted["ordinary (single reads)"] = count_ordinary(batch, filters, {})
            floor = batch * WIDTH * VOCABULARY * BF16.itemsize
            rows += [
                Row(path, batch, filters, moved, floor, round(moved / floor, 2))
                for path, moved in counted.items()
            ]
    return rows


NOT_READ = ("_choose_row", "logits_ptr")
FILTERED_DRAW = Variant("filter and draw", lambda bs: run_accept_filtered(bs, BF16))

OURS: Mapping[str, Sequence[Variant]] = {
    "greedy": (
        Variant("argmax", lambda bs: run_verify_argmax(bs, BF16)),
        Variant("accept", lambda bs: run_accept_match(bs, options=False)),
    ),
    "none": (Variant("draw and accept", lambda bs: run_accept_sampled(bs, BF16)),),
    **dict.fromkeys(FILTERED, (FILTERED_DRAW,)),
}


def count_ours(batch: int, filters: str) -> int:
    """Bytes of the tensors of all launches."""
    return count_launches(OURS[filters], batch)


def count_launches(variants: Sequence[Variant], batch: int) -> int:
    """Bytes of the tensors of the variants' launches."""
    return sum(
        physical_bytes(value)
        for variant in variants
        for launch in launches_of(variant, batch)
        for name, value in launch.arguments.items()
        # A row that fits is drawn from what was gathered; the op's README says which rows do.
        if isinstance(value, Tensor) and (launch.kernel.__name__, name) != NOT_READ
    )


def count_ordinary(batch: int, filters: str, passes: Mapping[str, float]) -> int:
    """Bytes where requests filter and SGLang's ordinary sampler draws, and then our acceptance."""
    counter = ByteCounter(passes)
    with FakeTensorMode(allow_non_fake_inputs=False), ordinary_sampler(counter) as sampler:
        logits = new(batch * WIDTH, VOCABULARY, dtype=BF16)
        info = sampling_info(batch * WIDTH, filters)
        with counter:
            logits = logits.float()  # the logits processor's copy
            output = LogitsProcessorOutput(next_token_logits=logits)
            sampler(output, info, False, [], [], new(batch * WIDTH))
    return counter.bytes + count_launches(OURS["greedy"][1:], batch)


@contextlib.contextmanager
def ordinary_sampler(counter: ByteCounter) -> Iterator[sampler_module.Sampler]:
    """SGLang's sampler as a CUDA server has it, its compiled kernels counted by hand."""
    sampler = sampler_module.Sampler.__new__(sampler_module.Sampler)
    torch.nn.Module.__init__(sampler)
    for name in ("rl_on_policy_target", "enable_deterministic", "use_log_softmax_logprob"):
        setattr(sampler, name, None)
    sampler.use_ascend_backend = False

    def sample(probs: Tensor, *_: Any, **__: Any) -> Tensor:
        ids = new(len(probs), dtype=torch.int32)
        counter.add("top_k_top_p_sampling", physical_bytes(probs), physical_bytes(ids))
        return ids

    replaced = {
        "sampler_softmax": lambda logits: torch.softmax(logits, dim=-1),  # counted as torch's
        "top_k_top_p_sampling_from_probs": sample,
        "get_exec": lambda: types.SimpleNamespace(
            kernel=types.SimpleNamespace(sampling_backend="flashinfer")
        ),
    }
    with contextlib.ExitStack() as stack:
        for name, replacement in replaced.items():
            patch = mock.patch.object(sampler_module, name, replacement, create=True)
            stack.enter_context(patch)
        yield sampler


def count_sglang(batch: int, filters: str, passes: Mapping[str, float]) -> int:
    """Bytes of SGLang's DFLASH worker from the head's bfloat16 logits to the accepted tokens."""
    rows = batch * WIDTH
    counter = ByteCounter(passes)
    with FakeTensorMode(allow_non_fake_inputs=False), renorm_kernels(counter):
        logits = new(rows, VOCABULARY, dtype=BF16)
        candidates = new(batch, WIDTH)
        dflash_utils._DFLASH_CHAIN_VERIFY_BUFFERS.clear()
        dflash_utils._get_or_create_chain_verify_buffers(
            bs=batch, draft_token_num=WIDTH, device=logits.device
        )
        with counter:
            logits = logits.float()  # the logits processor's copy
            if filters == "greedy":
                logits.argmax(dim=-1)
            else:
                sglang_sampled_verify(candidates, logits, filters)
    return counter.bytes


def sglang_sampled_verify(candidates: Tensor, logits: Tensor, filters: str) -> None:
    """The sampled verify of SGLang's DFLASH worker."""
    top_k = 20 if "top_k" in filters else None
    dflash_utils.compute_dflash_sampling_correct_drafts_and_bonus(
        candidates=candidates,
        next_token_logits=logits,
        sampling_info=sampling_info(candidates.shape[0], filters),
        max_top_k=top_k,
        uniform_top_k_value=top_k,
        threshold_single=1.0,
        threshold_acc=1.0,
    )


def sampling_info(rows: int, filters: str) -> types.SimpleNamespace:
    """What SGLang's samplers read of a batch's parameters."""
    return types.SimpleNamespace(
        is_all_greedy=False,
        temperatures=new(rows, 1, dtype=FP32),
        top_ks=new(rows, dtype=torch.int32),
        top_ps=new(rows, dtype=FP32),
        need_top_k_sampling="top_k" in filters,
        need_top_p_sampling="top_p" in filters,
        need_min_p_sampling=False,
        sampling_seed=None,
        sampling_mask_batch_indices=None,
        sampling_support_logprobs_capture_indices=None,
        has_custom_logit_processor=False,
        grammars=None,
    )


@contextlib.contextmanager
def renorm_kernels(counter: ByteCounter) -> Iterator[None]:
    """In place of the CUDA kernels that SGLang calls: count, and return empty results."""

    def renorm(op: str) -> Any:
        def run(probs: Tensor, _: Tensor) -> Tensor:
            counter.add(op, physical_bytes(probs), physical_bytes(probs))
            return torch.empty_like(probs)

        return run

    def tree_sampling(target_probs: Tensor, draft_probs: Tensor, **_: Any) -> None:
        # One row of both for each request: the one where the walk ends.
        row = (physical_bytes(target_probs) + physical_bytes(draft_probs)) // WIDTH
        counter.add("tree_sampling", row, 0)

    replaced = {
        "top_p_renorm_prob": renorm("top_p_renorm"),
        "top_k_renorm_prob": renorm("top_k_renorm"),
        "tree_speculative_sampling_target_only": tree_sampling,
        "_DFLASH_SAMPLING_VERIFY_AVAILABLE": True,
        "borrow_graph_pool": lambda **_: contextlib.nullcontext(),
    }
    with contextlib.ExitStack() as stack:
        for name, replacement in replaced.items():
            stack.enter_context(mock.patch.object(dflash_utils, name, replacement))
        yield
