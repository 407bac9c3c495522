"""The training loop both models share: optimisers, schedule, snapshots, progress."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

Measures = dict[str, float]
# Matrices whose rows stand for themselves: embeddings, gates, the taps of a convolution.
_ADAM_MATRICES = ("embed", "gate", "conv")


class Recipe(NamedTuple):
    """How long and how fast to train."""

    steps: int
    knots: tuple[tuple[int, float], ...]  # (step, share of the full rates), linear in between
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    report_every: int = 100

    def rate(self, step: int) -> float:
        """Learning rate of `step`, as a share of the full one."""
        return float(
            np.interp(step, [at for at, _ in self.knots], [share for _, share in self.knots])
        )


class Muon(torch.optim.Optimizer):
    """Momentum with an update orthogonalised by Newton-Schulz steps; for (stacks of) matrices.

    Source: K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024.
    """

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Apply one update."""
        for group in self.param_groups:
            by_shape: dict[tuple[int, int], list[nn.Parameter]] = {}
            for param in group["params"]:
                by_shape.setdefault(tuple(param.shape[-2:]), []).append(param)
            for (rows, columns), params in by_shape.items():
                averaged = [
                    self._average(p, group["momentum"]).reshape(-1, rows, columns) for p in params
                ]
                updates = orthogonalise(torch.cat(averaged)).split([len(a) for a in averaged])
                scale = group["lr"] * math.sqrt(max(1.0, rows / columns))
                for param, update in zip(params, updates, strict=True):
                    param.mul_(1 - 0.01 * group["lr"]).sub_(update.view_as(param), alpha=scale)

    def _average(self, param: nn.Parameter, momentum: float) -> Tensor:
        average = self.state[param].setdefault("average", torch.zeros_like(param))
        assert param.grad is not None
        average.lerp_(param.grad, 1 - momentum)
        return param.grad.lerp(average, momentum)


def orthogonalise(matrices: Tensor) -> Tensor:
    """Map the singular values of a stack of matrices [n, rows, columns] close to 1."""
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = (matrices if wide else matrices.mT).bfloat16()
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).bfloat16()
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ x
    return (x if wide else x.mT).float()


def fit(
    model: nn.Module,
    recipe: Recipe,
    step_loss: Callable[[int], float],
    measure: Callable[[], Measures],
    snapshot: Path,
) -> list[Measures]:
    """Train `model` in place and return its history, one record a report.

    Args:
        model: what to train; vectors and the matrices of `_ADAM_MATRICES` go to AdamW, the rest to
            Muon.
        recipe: steps and rates.
        step_loss: accumulates the gradients of the step given and returns its loss.
        measure: held-out measures, called at every report.
        snapshot: state file; written at every report, and training goes on from it when it exists.
    """
    optimisers = _optimisers(model, recipe)
    history, first = _resume(model, optimisers, snapshot)
    started, smooth = time.monotonic(), math.nan
    for step in range(first, recipe.steps):
        for optimiser, full in zip(optimisers, (recipe.muon_lr, recipe.adam_lr), strict=True):
            optimiser.param_groups[0]["lr"] = full * recipe.rate(step)
        loss = step_loss(step)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        smooth = loss if math.isnan(smooth) else 0.95 * smooth + 0.05 * loss
        if (step + 1) % recipe.report_every == 0 or step + 1 == recipe.steps:
            history.append({"step": step + 1, "loss": round(smooth, 5)} | measure())
            _save(model, optimisers, history, snapshot)
            pace = (time.monotonic() - started) / (step + 1 - first)
            left = pace * (recipe.steps - step - 1) / 60
            print(f"{json.dumps(history[-1])}  {pace:.2f} s/step, {left:.0f} min left", flush=True)
    return history


def _optimisers(model: nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, param in model.named_parameters():
        vector_like = param.ndim < 2 or name.endswith(_ADAM_MATRICES)
        (others if vector_like else matrices).append(param)
    adam = torch.optim.AdamW(others, recipe.adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
    return [Muon(matrices, recipe.muon_lr), adam]


def _save(
    model: nn.Module,
    optimisers: list[torch.optim.Optimizer],
    history: list[Measures],
    snapshot: Path,
) -> None:
    state = {
        "model": model.state_dict(),
        "optimisers": [optimiser.state_dict() for optimiser in optimisers],
        "history": history,
    }
    partial = snapshot.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(snapshot)


def _resume(
    model: nn.Module, optimisers: list[torch.optim.Optimizer], snapshot: Path
) -> tuple[list[Measures], int]:
    if not snapshot.exists():
        return [], 0
    state = torch.load(snapshot, weights_only=True)
    model.load_state_dict(state["model"])
    for optimiser, saved in zip(optimisers, state["optimisers"], strict=True):
        optimiser.load_state_dict(saved)
    return state["history"], int(state["history"][-1]["step"])
