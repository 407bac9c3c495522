"""Whether a single request's verify can end where its drafts are not worth it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.topk import TopK
from sglang.srt.layers.moe.utils import (
    MoeRunnerBackend,
    get_moe_a2a_backend,
    is_moe_input_scattered_across_dp_ranks,
)
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.runtime_context import get_exec, get_parallel

from dflash_sglang.core.accept import Rule

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

# On CUDA: a row without an expert reads no weights there and leaves zeros
# (docs/method/width.md, with the evidence and what is left out).
RUNNERS = (
    MoeRunnerBackend.TRITON,
    MoeRunnerBackend.MARLIN,
    MoeRunnerBackend.DEEP_GEMM,
    MoeRunnerBackend.FLASHINFER_CUTLASS,
)


def narrowing_problem(model_runner: ModelRunner, rule: Rule, *, capture: bool) -> str | None:
    """Why the verify of a single request is as wide as its draft; None where it can be narrower.

    With LoRA, or where ranks exchange tokens, there is one width, and nothing to narrow.

    Args:
        model_runner: the verifier's.
        rule: of the server.
        capture: whether verifies are captured as CUDA graphs.
    """
    return next(_problems(model_runner, rule, capture=capture), None)


def _problems(model_runner: ModelRunner, rule: Rule, *, capture: bool) -> Iterator[str]:
    if rule is not Rule.MATCH:
        yield "drafts are sampled, and the bound goes by the most likely ones"
    if capture and 1 not in get_exec().graph.cuda_graph_config.decode.bs:
        yield "no CUDA graph of a single request is captured (--cuda-graph-bs without 1)"
    yield from _layer_problems(model_runner.model, torch.device(model_runner.device))
    parallel = get_parallel()
    if (
        max(parallel.attn_dp_size, parallel.attn_cp_size) > 1
        or not get_moe_a2a_backend().is_none()
        or is_moe_input_scattered_across_dp_ranks()
    ):
        yield "a rank's experts do not see the request's tokens in order"
    exec_ = get_exec()
    if exec_.overlap.enable_two_batch_overlap or exec_.overlap.enable_single_batch_overlap:
        yield "batches overlap (--enable-two-batch-overlap, --enable-single-batch-overlap)"
    if exec_.moe.enable_eplb or exec_.moe.expert_distribution_recorder_mode:
        yield "expert placement (EPLB) or the recording of expert use counts every token"
    if exec_.features.enable_return_routed_experts:
        yield "routed experts are returned, those of tokens behind the bound as well"


def _layer_problems(model: Any, device: torch.device) -> Iterator[str]:
    modules = list(model.modules())
    experts = [module for module in modules if isinstance(module, FusedMoE)]
    routers = [module for module in modules if type(module) is TopK]
    if not experts:
        yield "the verifier has no routed experts, so a row less reads no weight less"
    if len(routers) != len(experts):
        yield "not all of the verifier's experts are behind SGLang's TopK router"
    if torch.version.hip is not None:
        yield "on ROCm rows are not left out of the experts"
    if device.type == "cpu":
        if any(type(one.quant_method) is not UnquantizedFusedMoEMethod for one in experts):
            yield "the experts are quantised, on a CPU"
        return
    runners = {router.topk_config.runner_backend for router in routers}
    for runner in sorted(runners - set(RUNNERS), key=str):
        name = getattr(runner, "value", runner)
        yield (
            f"the MoE runner {name} is not known to leave rows out; "
            f"--moe-runner-backend {' or '.join(one.value for one in RUNNERS)} would"
        )
