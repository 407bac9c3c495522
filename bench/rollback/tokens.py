"""Random tokens of a gated delta net, and the lengths in which they are committed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from bench import report
from bench.memory.recurrent_state import QWEN36

TRACES = report.DATA / "accept_traces.json"
LONGEST_HALF_LIFE = 10_000  # tokens
WINDOW = QWEN36.window + 1  # inputs of a convolution
MEAN_SOFTPLUS = 0.806  # of a standard normal variable


class Activations(NamedTuple):
    """What a layer's projections and convolution hand to the recurrence, of some tokens."""

    query: Tensor  # [1, key_heads, tokens, K]
    key: Tensor  # [1, key_heads, tokens, K]
    value: Tensor  # [1, heads, tokens, V]
    a: Tensor  # [1, tokens, heads]
    b: Tensor  # [1, tokens, heads]

    def rounded(self) -> Activations:
        """As a model in bfloat16 has them, in float32."""
        return Activations(*(part.bfloat16().float() for part in self))


class Size(NamedTuple):
    """A layer."""

    key_heads: int = QWEN36.key_heads
    heads: int = QWEN36.heads
    dim: int = QWEN36.key_dim

    def a_log(self) -> Tensor:
        """[heads]: half-lives from one token to the longest, for `a` drawn as `tokens` draws it."""
        half_lives = torch.logspace(0, math.log10(LONGEST_HALF_LIFE), self.heads)
        return (math.log(2) / (MEAN_SOFTPLUS * half_lives)).log()


def tokens(size: Size, commits: int, *, convolve: bool, seed: int = 0) -> Iterator[Activations]:
    """The tokens of each commit.

    Args:
        size: of the layer.
        commits: how many.
        convolve: neighbouring tokens are alike and keys have a common part, as behind a causal
            convolution and SiLU; else all are independent.
        seed: of what is drawn.
    """
    random = torch.Generator().manual_seed(seed)
    channels = (size.key_heads, size.key_heads, size.heads)
    past = [torch.randn(1, heads, WINDOW - 1, size.dim, generator=random) for heads in channels]
    for length in commit_lens(commits):
        parts = []
        for i, heads in enumerate(channels):
            drawn = torch.randn(1, heads, length, size.dim, generator=random)
            if convolve:
                row = torch.cat((past[i], drawn), 2)
                past[i] = row[:, :, -(WINDOW - 1) :]
                drawn = silu(row.unfold(2, WINDOW, 1).sum(-1) / math.sqrt(WINDOW))
            parts.append(drawn)
        gates = torch.randn(2, 1, length, size.heads, generator=random)
        yield Activations(*parts, *gates)


def commit_lens(commits: int) -> list[int]:
    """Committed tokens of steps in a row, of recorded requests of all families."""
    families: dict[str, list[list[int]]] = json.loads(TRACES.read_text())["families"]
    requests = [request for family in families.values() for request in family]
    random, found = Random(0), list[int]()
    while len(found) < commits:
        found += [accept_len + 1 for accept_len in random.choice(requests)]
    return found[:commits]
