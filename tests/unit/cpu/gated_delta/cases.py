"""Random layers and requests for the recurrent ops, and transformers' forms of them in float64."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as modeling

from dflash_sglang.cpu.gated_delta import rule_kernels

KEY_HEADS, HEADS, K, V = 2, 4, 16, 8
KERNEL_SIZE = 4
SLOTS = 20
DTYPE = torch.float64


class Tokens(NamedTuple):
    """What a layer makes of some tokens, packed request after request."""

    query: Tensor  # [total, KEY_HEADS, K]
    key: Tensor  # [total, KEY_HEADS, K]
    value: Tensor  # [total, HEADS, V]
    a: Tensor  # [total, HEADS]
    b: Tensor  # [total, HEADS]

    def rows(self, rows: Tensor) -> Tokens:
        """Some of the tokens."""
        return Tokens(*(part[rows] for part in self))

    @property
    def mixed(self) -> Tensor:
        """Query, key and value side by side, as a decode step gets them."""
        return torch.cat([part.flatten(1) for part in self[:3]], dim=1)


class Layer(NamedTuple):
    """The weights of a recurrence."""

    a_log: Tensor  # [HEADS]
    dt_bias: Tensor  # [HEADS]


def random_layer(random: torch.Generator) -> Layer:
    """Decays from almost nothing to almost all within a token."""
    return Layer(
        torch.linspace(-3, 2, HEADS, dtype=DTYPE),
        torch.randn(HEADS, generator=random, dtype=DTYPE),
    )


def random_tokens(total: int, random: torch.Generator) -> Tokens:
    """Tokens whose gates take the whole of their range."""
    shapes = ((KEY_HEADS, K), (KEY_HEADS, K), (HEADS, V), (HEADS,), (HEADS,))
    return Tokens(
        *(2 * torch.randn(total, *shape, generator=random, dtype=DTYPE) for shape in shapes)
    )


def random_states(random: torch.Generator) -> Tensor:
    """A pool of states, [SLOTS, HEADS, V, K]."""
    return torch.randn(SLOTS, HEADS, V, K, generator=random, dtype=DTYPE)


def prefill(
    layer: Layer, tokens: Tokens, states: Tensor, slots: Tensor, lengths: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Outputs [total, HEADS, V] and the states at chunks; moves ``states`` on."""
    starts = torch.tensor([0, *lengths]).cumsum(0)
    decay, beta = rule_kernels.fused_gdn_gating(layer.a_log, tokens.a, tokens.b, layer.dt_bias)
    output, _, chunks = rule_kernels.chunk_gated_delta_rule(
        tokens.query.unsqueeze(0),
        tokens.key.unsqueeze(0),
        tokens.value.unsqueeze(0),
        decay,
        beta,
        initial_state=states,
        initial_state_indices=slots,
        cu_seqlens=starts,
        use_qk_l2norm_in_kernel=True,
    )
    return output[0], chunks[0]


def decode(layer: Layer, tokens: Tokens, states: Tensor, slots: Tensor) -> Tensor:
    """Outputs [requests, HEADS, V] of one token of each request; moves ``states`` on."""
    out = states.new_empty(len(slots), 1, HEADS, V)
    rule_kernels.fused_recurrent_gated_delta_rule_packed_decode(
        tokens.mixed,
        tokens.a,
        tokens.b,
        layer.a_log,
        layer.dt_bias,
        K**-0.5,
        states,
        out,
        slots,
        use_qk_l2norm_in_kernel=True,
    )
    return out[:, 0]


def verify_with_snapshots(
    layer: Layer, tokens: Tokens, states: Tensor, slots: Tensor, snapshots: Tensor, rows: Tensor
) -> Tensor:
    """Outputs [requests * width, HEADS, V] of one block per request.

    Args:
        layer: the weights.
        tokens: equal blocks of the requests.
        states: the pool; not modified.
        slots: [requests].
        snapshots: [ROWS, BLOCK, HEADS, V, K], written.
        rows: [requests or more], rows of ``snapshots``.
    """
    width = len(tokens.value) // len(slots)
    output = rule_kernels.fused_sigmoid_gating_delta_rule_update(
        A_log=layer.a_log,
        a=tokens.a,
        dt_bias=layer.dt_bias,
        softplus_beta=1.0,
        softplus_threshold=20.0,
        q=tokens.query.unsqueeze(0),
        k=tokens.key.unsqueeze(0),
        v=tokens.value.unsqueeze(0),
        b=tokens.b,
        initial_state_source=states,
        initial_state_indices=slots,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=torch.arange(0, len(tokens.value) + 1, width),
        disable_state_update=True,
        intermediate_states_buffer=snapshots,
        intermediate_state_indices=rows,
    )
    return output[0]


def transformers_rule(
    name: str, layer: Layer, tokens: Tokens, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs [total, HEADS, V] and the state [HEADS, V, K] behind them, one request.

    Args:
        name: of transformers' function.
        layer: the weights.
        tokens: of the request.
        state: [HEADS, V, K], before.
    """
    repeats = HEADS // KEY_HEADS
    query, key = (part.repeat_interleave(repeats, 1) for part in tokens[:2])
    decay = -layer.a_log.exp() * F.softplus(tokens.a + layer.dt_bias)
    output, last = in_float64(name)(
        *(part.unsqueeze(0) for part in (query, key, tokens.value, decay, tokens.b.sigmoid())),
        initial_state=state.mT.unsqueeze(0),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return output[0], last[0].mT


def in_float64(name: str) -> Callable[..., Any]:
    """One of transformers' functions with its casts to float32 made casts to float64."""
    source = inspect.getsource(getattr(modeling, name)).partition("def ")
    assert "torch.float32" in source[2]
    namespace = dict(vars(modeling))
    exec("def " + source[2].replace("torch.float32", "torch.float64"), namespace)
    return namespace[name]
