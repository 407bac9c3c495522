"""SGLang's unquantised layers, multiplied by `products.linear`."""

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

from dflash_sglang.cpu.matmul.gemm import NEVER, linear, remember

logger = logging.getLogger(__name__)


class ByFasterLibrary:
    """``x W^T + b`` on stored weights."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The product; arguments as SGLang's."""
        return linear(x, layer.weight, bias)


class CpuLinearMethod(ByFasterLibrary, UnquantizedLinearMethod):
    """A linear layer."""


class CpuEmbeddingMethod(ByFasterLibrary, UnquantizedEmbeddingMethod):
    """A table of embeddings, or the head over it."""


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, layer.weight, layer.bias)


def install_products(model: nn.Module) -> None:
    """Let a model's float32 layers multiply by the faster library.

    Args:
        model: the model just loaded, its weights laid out; changed in place.
    """
    begins = []
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
                continue  # a head only where embeddings are tied: then measured when it is used
        elif type(module) is nn.Linear:
            cast(Any, module).forward = types.MethodType(_forward, module)
        else:
            continue
        begins.append(remember(cast(Tensor, module.weight)).begin)
    faster = sorted(begin for begin in begins if begin != NEVER)
    if faster:
        logger.info(
            "CPU platform: %d of %d weights are multiplied by oneDNN, from %d to %d tokens on",
            len(faster),
            len(begins),
            faster[0],
            faster[-1],
        )
