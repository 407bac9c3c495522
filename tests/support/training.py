"""Tiny random pairs, for the tests of the training recipe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dflash_sglang import zoo
from dflash_sglang.drafter.reference import DraftModel

if TYPE_CHECKING:
    from bench.train.verifier.model import Verifier

TOKENIZER = zoo.path("moe").verifier / "tokenizer.json"


def tiny_verifier(kind: str = "moe", top_k: int = 2) -> Verifier:
    """A small random verifier; its weights are large enough to matter and fit bfloat16."""
    from bench.train.verifier.model import Verifier
    from bench.train.verifier.shape import DeltaShape, VerifierShape

    torch.manual_seed(4)
    sizes: dict[str, Any] = {"hidden_size": 64, "head_dim": 16, "num_experts": 4, "top_k": top_k}
    if kind == "moe":
        shape = VerifierShape(rotary_dim=16, **sizes)
    else:
        shape = VerifierShape(
            num_layers=4,
            rotary_dim=12,
            delta=DeltaShape(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=24),
            full_attention_interval=4,
            output_gate=True,
            shared_expert_size=48,
            norm_offset=1.0,
            **sizes,
        )
    model = Verifier(shape)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(4) if param.ndim > 1 else param.add_(torch.randn_like(param) * 0.2)
            param.copy_(param.bfloat16())
    return model


def pack(folder: Path, verifier: Verifier, taps: tuple[int, ...]) -> Path:
    """Write a verifier and a random drafter for it as the real pairs are; returns `folder`."""
    from bench.train.drafter import draft_config
    from bench.train.export import export_drafter, export_verifier

    export_verifier(verifier, TOKENIZER, folder / "verifier")
    drafter = DraftModel(draft_config(verifier, taps))
    export_drafter(drafter, folder / "drafter")
    return folder
