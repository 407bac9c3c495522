"""The memory layout of a model's weights."""

from __future__ import annotations

import torch
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

from dflash_sglang.cpu.models.fusion import lay_out_weights


def test_weights_are_stored_transposed_and_stay_loadable() -> None:
    linear = ReplicatedLinear(6, 10, bias=False)
    assert type(linear.quant_method) is UnquantizedLinearMethod
    values = torch.randn(10, 6)
    linear.weight.data.copy_(values)
    lay_out_weights(linear)
    assert torch.equal(linear.weight, values)
    assert linear.weight.t().is_contiguous()
    linear.weight.data.copy_(2 * values)  # an update of the weights of a running server
    assert torch.equal(linear.weight, 2 * values)
    assert linear.weight.t().is_contiguous()
