"""Which models the fused decoder takes, and the memory layout of their weights."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.models.dflash import DFlashDraftModel
from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM
from torch import nn

from dflash_sglang.cpu.models import fusion
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


@pytest.mark.parametrize(
    ("kind", "obstacles"), [(Qwen3MoeForCausalLM, ["LoRA is on"]), (DFlashDraftModel, [])]
)
def test_with_lora_the_verifier_keeps_the_forward_that_applies_adapters(
    kind: type[nn.Module], obstacles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    moe = SimpleNamespace(enable_eplb=False, expert_distribution_recorder_mode=None)
    settings = {
        "get_parallel": SimpleNamespace(tp_size=1, pp_size=1, attn_dp_size=1),
        "get_exec": SimpleNamespace(
            moe=moe, features=SimpleNamespace(enable_return_routed_experts=False)
        ),
        "get_lora": SimpleNamespace(enable_lora=True),
        "get_observability": SimpleNamespace(
            forward_hooks=None, debug_tensor_dump_output_folder=None
        ),
    }
    for name, value in settings.items():
        monkeypatch.setattr(fusion, name, lambda value=value: value)
    model = kind.__new__(kind)
    nn.Module.__init__(model)
    model.layers = nn.ModuleList()
    model.model = nn.Module()
    model.model.layers = nn.ModuleList()
    assert list(fusion._obstacles(model)) == obstacles
