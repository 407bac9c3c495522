"""The mixture of experts as it is trained: tokens sorted by expert, with hand-written gradients."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.train.verifier.shape import VerifierShape, weight

# Expert groups are padded to this multiple: the CPU's matrix library prepares a product for every
# new shape, which costs more than the product itself.
ROW_MULTIPLE = 64


class ExpertRows(NamedTuple):
    """Where the experts' inputs lie: one group of rows an expert."""

    token_of_row: Tensor  # [rows] int64; spare rows hold token 0
    row_of_choice: Tensor  # [tokens * top_k] int64
    sizes: list[int]  # rows of each expert
    load: Tensor  # [experts] int64, choices of each expert


class Dispatch(torch.autograd.Function):
    """Copy tokens into the rows of their experts; the gradient is a gather, not a scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token_of_row: Tensor, row_of_choice: Tensor) -> Tensor:
        """Gather x [tokens, width] to [rows, width]; row_of_choice [tokens * top_k]."""
        ctx.save_for_backward(row_of_choice)
        ctx.tokens = len(x)
        return x[token_of_row]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Sum the gradients of a token's rows; spare rows have none."""
        (row_of_choice,) = ctx.saved_tensors
        choices = grad[row_of_choice].view(ctx.tokens, -1, grad.shape[-1]).unbind(1)
        return sum(choices[1:], start=choices[0]), None, None


class Combine(torch.autograd.Function):
    """Take every choice's output from its row; rows are taken once, so the gradient is a copy."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, row_of_choice: Tensor) -> Tensor:
        """Gather outputs [rows, width] to [tokens * top_k, width]."""
        ctx.save_for_backward(row_of_choice)
        ctx.rows = len(outputs)
        return outputs[row_of_choice]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Gradients of the rows; zero for spare ones."""
        (row_of_choice,) = ctx.saved_tensors
        return grad.new_zeros(ctx.rows, grad.shape[-1]).index_copy_(0, row_of_choice, grad), None


class Experts(nn.Module):
    """Top-k of a few small experts."""

    def __init__(self, shape: VerifierShape) -> None:
        super().__init__()
        self.shape = shape
        self.gate = weight(shape.num_experts, shape.hidden_size)
        self.gate_up = weight(shape.num_experts, 2 * shape.expert_size, shape.hidden_size)
        self.down = weight(shape.num_experts, shape.hidden_size, shape.expert_size)

    def router(self, x: Tensor) -> Tensor:
        """Probabilities [tokens, experts] float32 of x [tokens, hidden]."""
        return F.linear(x, self.gate).softmax(-1)

    def forward(self, x: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Top-k experts of every token, [tokens, hidden] bf16 -> same, and the balance loss."""
        s = self.shape
        weights, chosen = probs.topk(s.top_k, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).bfloat16()
        rows = assign_rows(chosen, s.num_experts)
        parts = Dispatch.apply(x, rows.token_of_row, rows.row_of_choice).split(rows.sizes)
        gate_up, down = self.gate_up.bfloat16().unbind(), self.down.bfloat16().unbind()
        gate, up = torch.cat(
            [F.linear(part, w) for part, w in zip(parts, gate_up, strict=True)]
        ).chunk(2, dim=-1)
        inner = (F.silu(gate) * up).split(rows.sizes)
        outputs = torch.cat([F.linear(part, w) for part, w in zip(inner, down, strict=True)])
        choices = Combine.apply(outputs, rows.row_of_choice).view(-1, s.top_k, s.hidden_size)
        first, *others = (choices * weights[..., None]).unbind(1)
        share = rows.load / rows.load.sum()
        return sum(others, start=first), s.num_experts * (share * probs.mean(0)).sum()


class SharedExpert(nn.Module):
    """The expert every token takes, weighed by a gate of its own."""

    def __init__(self, shape: VerifierShape) -> None:
        super().__init__()
        self.gate = weight(1, shape.hidden_size)
        self.gate_up = weight(2 * shape.shared_expert_size, shape.hidden_size)
        self.down = weight(shape.hidden_size, shape.shared_expert_size)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] bf16 -> same."""
        gate, up = F.linear(x, self.gate_up.bfloat16()).chunk(2, dim=-1)
        out = F.linear(F.silu(gate) * up, self.down.bfloat16())
        return F.linear(x, self.gate.bfloat16()).sigmoid() * out


def assign_rows(chosen: Tensor, experts: int) -> ExpertRows:
    """Group the choices [tokens, top_k] by expert, groups padded to `ROW_MULTIPLE`."""
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    load = torch.bincount(flat, minlength=experts)
    padded = (load + ROW_MULTIPLE - 1) // ROW_MULTIPLE * ROW_MULTIPLE
    shift = (padded.cumsum(0) - padded) - (
        load.cumsum(0) - load
    )  # rows before an expert less choices before it
    row_of_choice = torch.empty_like(order)
    row_of_choice[order] = torch.arange(len(order)) + shift[flat[order]]
    token_of_row = torch.zeros(int(padded.sum()), dtype=torch.int64)
    token_of_row[row_of_choice] = torch.arange(len(order)) // chosen.shape[1]
    return ExpertRows(token_of_row, row_of_choice, padded.tolist(), load)
