"""LoRA on a CPU: SGLang's torch backend by default, and a refusal of what it does not apply."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.lora.backend.torch_backend import TorchNativeLoRABackend
from sglang.srt.lora.backend.triton_backend import TritonLoRABackend
from sglang.srt.lora.layers import FusedMoEWithLoRA
from torch import nn

from dflash_sglang.cpu.lora import LORA_HOOKS, init_manager
from dflash_sglang.errors import PlatformError
from dflash_sglang.preflight.sglang_names import listed_names
from dflash_sglang.preflight.sglang_table import CPU

CPU_DEVICE = torch.device("cpu")


def manager_with(**changed: Any) -> SimpleNamespace:
    """SGLang's manager once adapters are wrapped around the attention of a model."""
    given = {
        "lora_backend": TorchNativeLoRABackend(2, CPU_DEVICE),
        "target_modules": {"qkv_proj", "o_proj"},
        "base_model": nn.ModuleList([nn.Linear(2, 2)]),
        "lm_head_module": None,
    }
    return SimpleNamespace(**{**given, **changed})


def start(manager: SimpleNamespace) -> None:
    """As SGLang makes its manager, which pins memory."""
    runner = SimpleNamespace(lora_manager=None)

    def original(runner: Any) -> None:
        torch.zeros(1, pin_memory=True)
        runner.lora_manager = manager

    init_manager(original, runner)
    assert runner.lora_manager is manager


def test_adapters_of_attention_are_served() -> None:
    start(manager_with())


def experts() -> nn.Module:
    return FusedMoEWithLoRA.__new__(FusedMoEWithLoRA)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"lora_backend": TritonLoRABackend(2, CPU_DEVICE)},
            r"--lora-backend \(given: triton\) needs an accelerator.*give torch_native",
        ),
        (
            {"base_model": SimpleNamespace(modules=lambda: [experts()])},
            r"LoRA on experts \(targets: o_proj, qkv_proj\).*Leave gate_proj",
        ),
        ({"lm_head_module": nn.Linear(2, 2)}, r"LoRA on lm_head.*Leave lm_head out"),
    ],
    ids=["Triton", "experts", "LM head"],
)
def test_what_the_torch_backend_does_not_apply_is_refused(
    changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlatformError, match=message):
        start(manager_with(**changed))


def test_the_torch_backend_takes_the_rows_of_other_prompts_for_the_lm_head() -> None:
    """Why the LM head is refused: only each prompt's last row gets there."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from dflash_sglang.cpu.pinning import without_pinning

    backend = TorchNativeLoRABackend(3, CPU_DEVICE)
    prompts = SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        batch_size=2,
        extend_seq_lens=torch.tensor([5, 5], dtype=torch.int32),
        extend_seq_lens_cpu=[5, 5],
    )
    without_pinning(backend.prepare_lora_batch, prompts, [1, 2], [0, 1, 1], [0.0, 1.0, 1.0], False)
    # Adapter 1 multiplies by 1, adapter 2 by 2.
    weights = torch.tensor([0.0, 1.0, 2.0]).view(3, 1, 1)
    rows = torch.ones(2, 1)  # the last of each prompt
    assert backend.run_lora_a_sgemm(rows, weights).flatten().tolist() != [1.0, 2.0]


def test_every_hook_is_in_the_contract() -> None:
    listed = {name.path.replace(":", ".") for name in listed_names(CPU)}
    assert {hook.target for hook in LORA_HOOKS} <= listed
