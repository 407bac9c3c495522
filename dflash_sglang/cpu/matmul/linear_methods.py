"""SGLang's unquantised linear layers and embeddings, computed by ``gemm.linear``."""

from __future__ import annotations

import logging
import types
from typing import Any, cast

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from torch import Tensor, nn

from dflash_sglang.cpu.matmul.autotune import NEVER
from dflash_sglang.cpu.matmul.gemm import linear, register_weight

logger = logging.getLogger(__name__)


class AutotunedLinear:
    """``apply`` of SGLang's quantisation methods, for unquantised weights."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x W^T + b``.

        Args:
            layer: has ``weight`` [out, in].
            x: [..., in].
            bias: [out].

        Returns:
            [..., out].
        """
        return linear(x, layer.weight, bias)


class CpuLinearMethod(AutotunedLinear, UnquantizedLinearMethod):
    """The method of a linear layer."""


class CpuEmbeddingMethod(AutotunedLinear, UnquantizedEmbeddingMethod):
    """The method of an embedding table and of the LM head."""


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, layer.weight, layer.bias)


def install_linear_methods(model: nn.Module) -> None:
    """Compute a model's float32 linear layers by ``gemm.linear``.

    Args:
        model: the model just loaded, its weights laid out; changed in place.
    """
    crossovers = []
    for module in model.modules():
        if getattr(module, "weight", None) is None or module.weight.dtype != torch.float32:
            continue
        method = getattr(module, "quant_method", None)
        if isinstance(module, LinearBase) and type(method) is UnquantizedLinearMethod:
            module.quant_method = CpuLinearMethod()
        elif (
            isinstance(module, VocabParallelEmbedding)
            and type(method) is UnquantizedEmbeddingMethod
        ):
            module.quant_method = CpuEmbeddingMethod()
            if not isinstance(module, ParallelLMHead):
                continue  # an LM head only if embeddings are tied; then registered on first use
        elif type(module) is nn.Linear:
            cast(Any, module).forward = types.MethodType(_forward, module)
        else:
            continue
        crossovers.append(register_weight(cast(Tensor, module.weight)).crossover)
    faster = sorted(crossover for crossover in crossovers if crossover != NEVER)
    if faster:
        logger.info(
            "CPU platform: %d of %d weights are multiplied by oneDNN, from %d to %d tokens on",
            len(faster),
            len(crossovers),
            faster[0],
            faster[-1],
        )
