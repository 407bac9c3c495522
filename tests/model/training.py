"""Imports of bench/pair_*.py and tiny random pairs, for the tests of the training recipe."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from dflash_sglang import zoo
from dflash_sglang.model.reference import DraftModel

BENCH = Path(__file__).resolve().parents[2] / "bench"
TOKENIZER = zoo.path("moe").verifier / "tokenizer.json"


@contextmanager
def bench_modules() -> Iterator[None]:
    """Import bench/pair_*.py by name, as its scripts do."""
    sys.path.insert(0, str(BENCH))
    yield
    sys.path.remove(str(BENCH))
    for name in [name for name in sys.modules if name.startswith("pair_")]:
        del sys.modules[name]


def tiny_verifier(kind: str = "moe", top_k: int = 2) -> torch.nn.Module:
    """A small random verifier; its weights are large enough to matter and fit bfloat16."""
    import pair_models
    import pair_shape

    torch.manual_seed(4)
    sizes = {"hidden_size": 64, "head_dim": 16, "num_experts": 4, "top_k": top_k}
    if kind == "moe":
        shape = pair_shape.VerifierShape(rotary_dim=16, **sizes)
    else:
        shape = pair_shape.VerifierShape(
            num_layers=4,
            rotary_dim=12,
            delta=pair_shape.DeltaShape(
                num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=24
            ),
            full_attention_interval=4,
            output_gate=True,
            shared_expert_size=48,
            norm_offset=1.0,
            **sizes,
        )
    model = pair_models.Verifier(shape)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(4) if param.ndim > 1 else param.add_(torch.randn_like(param) * 0.2)
            param.copy_(param.bfloat16())
    return model


def pack(folder: Path, verifier: torch.nn.Module, taps: tuple[int, ...]) -> Path:
    """Write a verifier and a random drafter for it as the real pairs are; returns `folder`."""
    import pair_drafter
    import pair_export

    pair_export.export_verifier(verifier, TOKENIZER, folder / "verifier")
    drafter = DraftModel(pair_drafter.draft_config(verifier, taps))
    pair_export.export_drafter(drafter, folder / "drafter")
    return folder
