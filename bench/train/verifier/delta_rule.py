"""The gated delta rule over whole sequences, chunk by chunk, for training.

Every head keeps a state S [key_dim, value_dim]. Token t decays it, corrects what it holds under the
token's key towards the token's value, and reads it with the token's query:

    u_t = beta_t (v_t - exp(g_t) S_{t-1}' k_t)
    S_t = exp(g_t) S_{t-1} + k_t u_t'
    o_t = S_t' q_t

Source: S. Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024, section 3.3.
With c_t the sum of g from the start of a chunk to t, the u of a chunk solve a triangular system

    (I + A) U = beta (V - exp(c) K S),   A_ij = beta_i exp(c_i - c_j) k_i'k_j  for j < i,

where S is the state before the chunk: products of small matrices instead of a loop over tokens.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# A short chunk: the powers of A below grow at most as binomials of its length, and float32 holds
# those of 16 without loss.
CHUNK = 16


class ChunkTerms(NamedTuple):
    """What a chunk contributes, given the state before it; n is rows * heads."""

    values: Tensor  # [n, chunks, chunk, value_dim] U if that state were zero
    reads: Tensor  # [n, chunks, chunk, key_dim] U loses reads @ state
    scores: Tensor  # [n, chunks, chunk, chunk] causal and decayed q'k
    queries: Tensor  # [n, chunks, chunk, key_dim] decayed since the start of the chunk
    keys: Tensor  # [n, chunks, chunk, key_dim] decayed to the end of the chunk
    decay: Tensor  # [n, chunks, 1, 1] of the state over the whole chunk


@torch.compiler.disable  # its loop follows the length of the rows: every length would be compiled
def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Outputs [rows, length, heads, value_dim] of every token, from a state of zero.

    Args:
        q: [rows, length, heads, key_dim] float32, scaled.
        k: [rows, length, heads, key_dim] float32, of norm 1.
        v: [rows, length, heads, value_dim] float32.
        g: [rows, length, heads] float32, logarithm of the decay, at most 0.
        beta: [rows, length, heads] float32, how much of the error is corrected, 0 to 1.
    """
    rows, length, heads, _ = q.shape
    out = scan(chunk_terms(*(_split(x) for x in (q, k, v, g, beta))))
    return out.view(rows, heads, -1, v.shape[-1])[:, :, :length].transpose(1, 2)


def chunk_terms(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> ChunkTerms:
    """Everything that needs no state, for all chunks at once; arguments as `_split` gives them."""
    total = g.cumsum(-1)  # [n, chunks, chunk]
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu(1)
    # Masked before the exponential: it overflows above the diagonal.
    apart = (total[..., :, None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()
    grown = total.exp()[..., None]
    system = (beta[..., None] * (k @ k.mT) * apart).tril(-1)
    solved = solve(system, torch.cat([v, k * grown], dim=-1) * beta[..., None])
    values, reads = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    return ChunkTerms(
        values=values,
        reads=reads,
        scores=(q @ k.mT) * apart,
        queries=q * grown,
        keys=k * (total[..., -1:] - total).exp()[..., None],
        decay=total[..., -1].exp()[..., None, None],
    )


def solve(strict: Tensor, right: Tensor) -> Tensor:
    """(I + strict)^-1 right for strictly lower triangular matrices [..., CHUNK, CHUNK].

    (I - N)^-1 = (I + N)(I + N^2)(I + N^4)..., which ends because N^CHUNK is zero.
    """
    power, reach = -strict, 1
    right = right + power @ right
    while 2 * reach < CHUNK:
        power, reach = power @ power, 2 * reach
        right = right + power @ right
    return right


def scan(terms: ChunkTerms) -> Tensor:
    """Carry the state through the chunks: outputs [n, chunks, chunk, value_dim]."""
    state = terms.keys.new_zeros(len(terms.keys), terms.keys.shape[-1], terms.values.shape[-1])
    outputs = []
    for values, reads, scores, queries, keys, decay in zip(
        *(term.unbind(1) for term in terms), strict=True
    ):
        updates = torch.baddbmm(values, reads, state, alpha=-1)
        outputs.append(torch.baddbmm(scores @ updates, queries, state))
        state = torch.baddbmm(decay * state, keys.mT, updates)
    return torch.stack(outputs, dim=1)


def _split(x: Tensor) -> Tensor:
    """[rows, length, heads, ...] -> [rows * heads, chunks, CHUNK, ...].

    Padded with zeros behind the last token: a correction of 0 changes no state.
    """
    rows, length, heads = x.shape[:3]
    padded = F.pad(x, (0, 0) * (x.ndim - 2) + (0, -length % CHUNK))
    return padded.transpose(1, 2).reshape(rows * heads, -1, CHUNK, *x.shape[3:])
