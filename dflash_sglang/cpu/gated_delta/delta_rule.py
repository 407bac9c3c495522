"""The gated delta rule over a block of tokens: one recurrence for prefill, decode and verify.

The state of a head is a matrix S, [V, K]. Token t decays it, corrects its value for key k_t
towards v_t, and reads it with query q_t:

    S_t = exp(g_t) S_{t-1} + d_t k_t^T        d_t = beta_t (v_t - exp(g_t) S_{t-1} k_t)
    o_t = S_t q_t

d_t is the *update* of the token. With G_t the sum of g up to t, unrolling the first line from the
state before the block gives all updates of a block at once, as the solution of a unit lower
triangular system, and from them all outputs and the state after any prefix of the block:

    (I + A) D = B     A_ts = beta_t exp(G_t - G_s) k_t.k_s  (s < t)
                      b_t  = beta_t (v_t - exp(G_t) S_0 k_t)
    o_t = exp(G_t) S_0 q_t + sum_{s<=t} exp(G_t - G_s) (k_s.q_t) d_s
    S_t = exp(G_t) S_0     + sum_{s<=t} exp(G_t - G_s) d_s k_s^T

Only differences of G with t >= s are exponentiated, and g <= 0, so nothing overflows.

Source: Yang et al., Gated Delta Networks (arXiv 2412.06464).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Tokens of a prefill that are processed as one block, and the distance of the states returned. As
# in SGLang's kernels: its prefix cache stores states at multiples of it.
CHUNK = 64


class TokenBlock(NamedTuple):
    """The inputs of a block of tokens; rows are requests.

    A token whose beta, g and key are zero does not change the state: padding.
    """

    query: Tensor  # [rows, key_heads, tokens, K], unit length times the scale
    key: Tensor  # [rows, key_heads, tokens, K], unit length
    value: Tensor  # [rows, heads, tokens, V]; heads is a multiple of key_heads
    decay: Tensor  # [rows, heads, tokens], g: log decay, at most 0
    beta: Tensor  # [rows, heads, tokens], 0 .. 1


class Updates(NamedTuple):
    """The updates of a block; any prefix of them can be applied to the state later."""

    update: Tensor  # [..., heads, tokens, V], d
    key: Tensor  # [..., key_heads, tokens, K]
    decay: Tensor  # [..., heads, tokens], g


def gates(
    a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Log decay and beta of every token.

    Args:
        a: [..., heads], projected.
        b: [..., heads], projected.
        a_log: [heads].
        dt_bias: [heads].
        dtype: to compute and return in.

    Returns:
        ``g = -exp(a_log) softplus(a + dt_bias)`` and ``beta = sigmoid(b)``, shaped as a.
    """
    rate = F.softplus(a.to(dtype) + dt_bias.to(dtype))
    return rate.mul_(a_log.to(dtype).exp().neg_()), b.to(dtype).sigmoid()


def unit_length(x: Tensor) -> Tensor:
    """Vectors along the last axis divided by their lengths; 1e-6 is added to the square."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True).add_(1e-6))


def run_block(state: Tensor, block: TokenBlock) -> tuple[Tensor, Updates]:
    """Outputs and updates of a block, from the state before it.

    Args:
        state: [rows, heads, V, K], before the block; not modified.
        block: the tokens, in state's dtype.

    Returns:
        The outputs [rows, heads, tokens, V], and the updates for ``apply_updates``.
    """
    heads, tokens = block.decay.shape[1:]
    query, key = _per_head(block.query, heads), _per_head(block.key, heads)
    total = block.decay.cumsum(-1)  # G
    # Both products with the state in one matmul: [rows, heads, 2 * tokens, V].
    held = torch.cat((query, key), dim=2) @ state.mT
    carried = total.exp().unsqueeze(-1)
    held_query, held_key = held[:, :, :tokens] * carried, held[:, :, tokens:] * carried
    target = (block.value - held_key) * block.beta.unsqueeze(-1)
    if tokens == 1:  # no earlier token: the update is the target
        output = torch.addcmul(held_query, (query * key).sum(-1, keepdim=True), target)
        return output, Updates(target, block.key, block.decay)
    between = _between(total)
    # The solver takes the diagonal as 1.
    system = between * (key @ key.mT) * block.beta.unsqueeze(-1)
    update = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)
    output = held_query + (between * (query @ key.mT)) @ update
    return output, Updates(update, block.key, block.decay)


def apply_updates(state: Tensor, updates: Updates, lengths: Tensor | None = None) -> Tensor:
    """The state after a prefix of a block.

    Args:
        state: [..., heads, V, K], before the block; not modified.
        updates: of the block, with the same leading axes as the state.
        lengths: [rows] int, tokens of each request to apply; None for all. Rows are the axis
            before the heads.

    Returns:
        A new tensor shaped as ``state``.
    """
    update, key, decay = updates
    heads, tokens = decay.shape[-2:]
    if lengths is not None:
        counts = torch.arange(tokens) < lengths[:, None]  # [rows, tokens]
        decay = decay * counts[:, None]
        update = update * counts[:, None, :, None]
    total = decay.cumsum(-1)
    last = total[..., -1:]
    weighted = update * (last - total).exp().unsqueeze(-1)
    return state * last.exp().unsqueeze(-1) + weighted.mT @ _per_head(key, heads)


def states_after_each_token(state: Tensor, updates: Updates) -> Tensor:
    """The states after each token of a block, [rows, tokens, heads, V, K]."""
    heads, tokens = updates.decay.shape[-2:]
    key = _per_head(updates.key, heads)
    steps = []
    for t in range(tokens):
        added = updates.update[:, :, t, :, None] * key[:, :, t, None, :]
        state = torch.addcmul(added, state, updates.decay[:, :, t, None, None].exp())
        steps.append(state)
    return torch.stack(steps, dim=1)


def _between(total: Tensor) -> Tensor:
    """exp(G_t - G_s) for s <= t, else 0: [rows, heads, t, s]."""
    tokens = total.shape[-1]
    later = torch.ones(tokens, tokens, dtype=torch.bool).triu_(1)
    difference = total.unsqueeze(-1) - total.unsqueeze(-2)
    return difference.masked_fill_(later, float("-inf")).exp_()


def _per_head(x: Tensor, heads: int) -> Tensor:
    """[..., key_heads, tokens, K] repeated for the value heads that share a key head."""
    return x if x.shape[-3] == heads else x.repeat_interleave(heads // x.shape[-3], dim=-3)
