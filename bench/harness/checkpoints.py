"""Variants of embedded drafters: random weights, sliding-window layers, a short context."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dflash_sglang import zoo


def random_drafter(folder: Path, seed: int = 0, model: str = "moe") -> Path:
    """A drafter of an embedded one's shapes that has learnt nothing."""
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.randn(tensor.shape, generator=generator).mul(0.02).to(tensor.dtype)
        if tensor.dim() > 1
        else torch.ones_like(tensor)  # norms, or every hidden state is close to zero
        for name, tensor in load_file(zoo.path(model).drafter / "model.safetensors").items()
    }
    return _write(folder, weights, {}, model)


def without_weights(folder: Path, model: str = "moe") -> Path:
    """The configuration of an embedded drafter, for ``--speculative-draft-load-format dummy``."""
    folder.mkdir(parents=True)
    config = (zoo.path(model).drafter / "config.json").read_text()
    (folder / "config.json").write_text(config)
    return folder


def sliding_drafter(folder: Path, window: int = 16, model: str = "moe") -> Path:
    """An embedded drafter with its first layer seeing only the last `window` tokens."""
    weights = load_file(zoo.path(model).drafter / "model.safetensors")
    layers = json.loads((zoo.path(model).drafter / "config.json").read_text())["num_hidden_layers"]
    types = ["sliding_attention"] + ["full_attention"] * (layers - 1)
    return _write(
        folder,
        weights,
        {"layer_types": types, "sliding_window": window, "use_sliding_window": True},
        model,
    )


def short_drafter(folder: Path, positions: int) -> Path:
    """The embedded drafter made for a context of `positions` tokens."""
    weights = load_file(zoo.path("moe").drafter / "model.safetensors")
    return _write(folder, weights, {"max_position_embeddings": positions}, "moe")


def _write(
    folder: Path, weights: dict[str, torch.Tensor], changes: dict[str, object], model: str
) -> Path:
    folder.mkdir(parents=True)
    config = json.loads((zoo.path(model).drafter / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}, indent=1))
    save_file(weights, folder / "model.safetensors")
    return folder
