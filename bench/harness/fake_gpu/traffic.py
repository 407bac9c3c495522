"""The sizes of a fake server (`bench/harness/fake_gpu/fakes.py`) and the requests of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

BLOCK = 16
CONTEXT = 4096
PREFIX = 100  # tokens of every request so far


class Sizes(NamedTuple):
    """Where the tensors of a server are, and how large those are that its models make."""

    device: str
    dtype: torch.dtype  # of weights, hidden states and the drafter's KV
    vocabulary: int
    hidden: int  # of verifier and drafter
    kv_heads: int  # of the drafter; it has twice as many heads
    head_dim: int
    max_requests: int
    slots: int  # of the KV pool


PUBLIC = Sizes(  # of a public pair
    device="cuda",
    dtype=torch.bfloat16,
    vocabulary=248_320,
    hidden=2048,
    kv_heads=8,
    head_dim=128,
    max_requests=64,
    slots=1 << 16,
)


class Traffic(NamedTuple):
    """The requests of a step."""

    batch: int
    sampled: bool  # temperature, no filters; otherwise greedy
    width: int = BLOCK  # drafted and verified tokens


class Anything(SimpleNamespace):
    """What is not set is None."""

    def __getattr__(self, name: str) -> None:
        return None


def new(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor on the fake GPU."""
    return torch.empty(shape, dtype=dtype, device=PUBLIC.device)


def make_batch(traffic: Traffic, spec_info: Any) -> Any:
    """What the scheduler hands over, in a steady step of an overlapped server.

    Args:
        traffic: the requests.
        spec_info: the state that a worker carries from one step to the next.
    """
    bs = traffic.batch
    with unset_fake_temporarily():  # the host's own tensors are real
        lens = torch.full((bs,), PREFIX)
    return Anything(
        reqs=[Anything(rid=str(row), sampling_params=_params(traffic)) for row in range(bs)],
        forward_mode=ForwardMode.DECODE,
        spec_algorithm=SpeculativeAlgorithm.DFLASH,
        spec_info=spec_info,
        seq_lens=new(bs),
        seq_lens_cpu=lens,
        seq_lens_sum=PREFIX * bs,
        req_pool_indices=new(bs),
        sampling_info=_sampling_info(traffic),
        can_run_decode_cuda_graph=True,
        has_grammar=False,
        return_logprob=False,
        is_extend_in_batch=False,
    )


def _params(traffic: Traffic) -> Any:
    return SimpleNamespace(
        top_k=TOP_K_ALL if traffic.sampled else 1,
        top_p=1.0,
        min_p=0.0,
        temperature=1.0,
        custom_params=None,
    )


def _sampling_info(traffic: Traffic) -> SamplingBatchInfo:
    bs = traffic.batch
    return SamplingBatchInfo(
        temperatures=new(bs, 1, dtype=torch.float32),
        top_ps=new(bs, dtype=torch.float32),
        top_ks=new(bs, dtype=torch.int32),
        min_ps=new(bs, dtype=torch.float32),
        is_all_greedy=not traffic.sampled,
        is_any_greedy=not traffic.sampled,
        need_top_p_sampling=False,
        need_top_k_sampling=not traffic.sampled,
        need_min_p_sampling=False,
        vocab_size=PUBLIC.vocabulary,
    )
