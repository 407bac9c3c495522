"""The chunked gated delta rule of the training model against loops over tokens."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # as `gated_delta_rule` takes them


def inputs(length: int, dtype: torch.dtype = torch.float64) -> Inputs:
    """Two rows of three heads, keys narrower than values."""
    generator = torch.Generator().manual_seed(length)

    def draw(*size: int) -> Tensor:
        return torch.randn(2, length, 3, *size, generator=generator, dtype=dtype)

    q, k = (normalize(draw(8), dim=-1) for _ in range(2))
    return q, k, draw(20), -draw().exp(), draw().sigmoid()


def token_by_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The recurrence as its paper writes it."""
    state = q.new_zeros(*q.shape[:1], *q.shape[2:], v.shape[-1])  # [rows, heads, key, value]
    outputs = []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        held = torch.einsum("rhkv,rhk->rhv", state, k[:, t])
        correction = beta[:, t, :, None] * (v[:, t] - held)
        state = state + torch.einsum("rhk,rhv->rhkv", k[:, t], correction)
        outputs.append(torch.einsum("rhkv,rhk->rhv", state, q[:, t]))
    return torch.stack(outputs, dim=1)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 32, 53])
def test_chunks_equal_tokens(length: int) -> None:
    """One token, a chunk less and more one, whole chunks, a ragged end."""
    from bench.train.verifier.delta_rule import gated_delta_rule

    case = inputs(length)
    # float64 keeps 16 digits; chunks only add in another order.
    torch.testing.assert_close(
        gated_delta_rule(*case), token_by_token(*case), atol=1e-12, rtol=1e-12
    )


def test_gradients_of_chunks_equal_those_of_tokens() -> None:
    from bench.train.verifier.delta_rule import gated_delta_rule

    gradients = []
    for rule in (gated_delta_rule, token_by_token):
        case = [x.requires_grad_() for x in inputs(37)]
        out = rule(*case)
        (out * torch.arange(out.numel(), dtype=out.dtype).view_as(out).sin()).sum().backward()
        gradients.append([x.grad for x in case])
    for got, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("length", [5, 64, 100])
def test_chunks_equal_transformers(length: int) -> None:
    """Its loop over tokens, which runs in float32, normalises and scales by itself."""
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
        torch_recurrent_gated_delta_rule,
    )

    from bench.train.verifier.delta_rule import gated_delta_rule

    q, k, v, g, beta = inputs(length, torch.float32)
    expected, _ = torch_recurrent_gated_delta_rule(
        q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True
    )
    got = gated_delta_rule(q * q.shape[-1] ** -0.5, k, v, g, beta)
    # transformers adds 1e-6 to the squared norm of keys that have norm 1 already.
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_the_worst_system_of_a_chunk_is_solved_in_float32() -> None:
    """Every key the same, nothing decays: powers of the system grow as binomials, 6,435 of 15."""
    from bench.train.verifier.delta_rule import gated_delta_rule

    q, k, v, g, beta = inputs(64, torch.float32)
    k = k[:, :1].expand_as(k)
    case = (q, k, v, torch.zeros_like(g), torch.ones_like(beta))
    expected = token_by_token(*(x.double() for x in case))
    # float32 keeps 7 digits, the binomials take 4 of them.
    torch.testing.assert_close(gated_delta_rule(*case).double(), expected, atol=1e-2, rtol=1e-2)


def test_strong_decay_overflows_nowhere() -> None:
    """exp(c_i - c_j) for j behind i is e to the 600th: it must never be computed, nor its slope."""
    from bench.train.verifier.delta_rule import gated_delta_rule

    q, k, v, g, beta = inputs(40, torch.float32)
    case = [x.requires_grad_() for x in (q, k, v, torch.full_like(g, -40.0), beta)]
    out = gated_delta_rule(*case)
    out.sum().backward()
    assert out.isfinite().all()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in case)
