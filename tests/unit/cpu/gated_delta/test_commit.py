"""Replay and snapshots: the committed states are those of a decoding that stopped there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dflash_sglang.cpu.gated_delta import conv_kernels, replay, state_copy
from tests.unit.cpu.gated_delta import cases
from tests.unit.cpu.gated_delta.cases import HEADS, KERNEL_SIZE, KEY_HEADS, SLOTS, K, V

LAYERS, BLOCK, ROWS, CHANNELS = 2, 16, 20, 6
CLOSE: dict[str, Any] = {"atol": 1e-11, "rtol": 1e-9}  # orders of rounding in float64


class Pools(NamedTuple):
    """States and what a verify keeps, of all layers."""

    temporal: Tensor
    conv: list[Tensor]
    intermediate_ssm: Tensor
    intermediate_conv_window: list[Tensor]
    record: dict[str, Tensor]


def make_pools(random: torch.Generator) -> Pools:
    past = KERNEL_SIZE - 1
    inputs = torch.full((LAYERS, ROWS, CHANNELS, BLOCK + past - 1), torch.nan, dtype=cases.DTYPE)
    layer, row, channel, column = inputs.stride()
    windows = inputs.as_strided(
        (LAYERS, ROWS, BLOCK, CHANNELS, past), (layer, row, column, channel, column)
    )
    nan: dict[str, Any] = {"fill_value": torch.nan, "dtype": cases.DTYPE}
    return Pools(
        torch.stack([cases.random_states(random) for _ in range(LAYERS)]),
        [torch.randn(LAYERS, SLOTS, CHANNELS, past, generator=random, dtype=cases.DTYPE)],
        torch.full((LAYERS, ROWS, BLOCK, HEADS, V, K), **nan),
        [windows],
        {
            "d_cache": torch.full((LAYERS, ROWS, HEADS, BLOCK, V), **nan),
            "k_cache": torch.full((LAYERS, ROWS, KEY_HEADS, BLOCK, K), **nan),
            "g_cache": torch.full((LAYERS, ROWS, HEADS, BLOCK), **nan),
        },
    )


class Verified(NamedTuple):
    """A verified batch, and the states of decoding its tokens one by one, after every token."""

    pools: Pools
    slots: Tensor  # [requests]
    rows: Tensor  # [requests], of the record
    states: Tensor  # [width, LAYERS, requests, HEADS, V, K], after each token
    windows: Tensor  # [width, LAYERS, requests, CHANNELS, KERNEL_SIZE - 1]


def verify(random: torch.Generator, requests: int, width: int, snapshots: bool) -> Verified:
    pools = make_pools(random)
    slots = 1 + torch.randperm(SLOTS - 1, generator=random)[:requests]
    rows = torch.randperm(ROWS, generator=random)[:requests]
    starts = torch.arange(0, requests * width + 1, width)
    flat = torch.arange(requests * width).view(requests, width)
    after: list[list[Tensor]] = [[] for _ in range(width)]
    moved: list[list[Tensor]] = [[] for _ in range(width)]
    for number in range(LAYERS):
        layer, tokens = cases.random_layer(random), cases.random_tokens(flat.numel(), random)
        outputs = torch.empty(flat.numel(), HEADS, V, dtype=cases.DTYPE)
        if snapshots:
            outputs = cases.verify_with_snapshots(
                layer,
                tokens,
                pools.temporal[number],
                slots,
                pools.intermediate_ssm[number],
                torch.arange(ROWS),
            )
        else:
            replay.gdn_replayssm_spec_decode(
                q=tokens.query,
                k=tokens.key,
                v=tokens.value,
                a=tokens.a,
                b=tokens.b,
                A_log=layer.a_log,
                dt_bias=layer.dt_bias,
                checkpoint_state=pools.temporal[number],
                d_cache=pools.record["d_cache"][number],
                k_cache=pools.record["k_cache"][number],
                g_cache=pools.record["g_cache"][number],
                out=outputs,
                query_start_loc=starts,
                ssm_state_indices=slots,
                replay_indices=rows,
            )
        weight = torch.randn(CHANNELS, KERNEL_SIZE, generator=random, dtype=cases.DTYPE)
        inputs = torch.randn(requests, width, CHANNELS, generator=random, dtype=cases.DTYPE)
        conv_kernels.causal_conv1d_update(
            inputs.mT,
            pools.conv[0][number],
            weight,
            activation="silu",
            conv_state_indices=slots,
            intermediate_conv_window=pools.intermediate_conv_window[0][number],
            intermediate_state_indices=torch.arange(ROWS)[:requests],
        )
        by_token, conv = pools.temporal[number].clone(), pools.conv[0][number].clone()
        for step in range(width):
            expected = cases.decode(layer, tokens.rows(flat[:, step]), by_token, slots)
            torch.testing.assert_close(outputs[flat[:, step]], expected, **CLOSE)
            conv_kernels.causal_conv1d_update(
                inputs[:, step], conv, weight, activation="silu", conv_state_indices=slots
            )
            after[step].append(by_token[slots])
            moved[step].append(conv[slots])
    return Verified(
        pools,
        slots,
        rows,
        torch.stack([torch.stack(layers) for layers in after]),
        torch.stack([torch.stack(layers) for layers in moved]),
    )


def commit(
    done: Verified, snapshots: bool, lengths: Tensor, to: Tensor | None, steps: Tensor | None
) -> None:
    """As the worker does: ``lengths`` committed tokens, states of ``steps`` copied to ``to``."""
    pools = done.pools
    if snapshots:
        state_copy.scatter_mamba_states_after_mtp_verify(pools, done.slots, lengths - 1, to, steps)
        return
    replay.commit_gdn_replayssm_circular(
        checkpoint_state=pools.temporal,
        **pools.record,
        state_batch_indices=done.slots,
        replay_indices=done.rows,
        accept_lens=lengths,
        mamba_track_indices=to,
        mamba_steps_to_track=steps,
    )
    windows = pools.intermediate_conv_window[0]
    state_copy.fused_conv_window_scatter_with_mask(pools.conv[0], windows, done.slots, lengths - 1)
    if to is not None and steps is not None:
        state_copy.fused_conv_window_scatter_with_mask(pools.conv[0], windows, to, steps)


def assert_committed(done: Verified, slots: Tensor, lengths: Tensor) -> None:
    request = torch.arange(len(slots))
    expected = done.states[lengths - 1, :, request].transpose(0, 1)
    torch.testing.assert_close(done.pools.temporal[:, slots], expected, **CLOSE)
    expected = done.windows[lengths - 1, :, request].transpose(0, 1)
    torch.testing.assert_close(done.pools.conv[0][:, slots], expected, **CLOSE)


@pytest.mark.parametrize("snapshots", [False, True], ids=["replay", "snapshots"])
@pytest.mark.parametrize("width", [1, 2, 5, BLOCK])
def test_every_accepted_length_commits_the_state_of_a_decoding(
    random: torch.Generator, width: int, snapshots: bool
) -> None:
    """A batch in which request i commits i + 1 tokens, in all layers at once."""
    done = verify(random, requests=width, width=width, snapshots=snapshots)
    lengths = torch.arange(1, width + 1, dtype=torch.int32)
    lengths = lengths[torch.randperm(width, generator=random)]
    before = done.pools.temporal.clone()
    commit(done, snapshots, lengths, None, None)
    assert_committed(done, done.slots, lengths)
    others = [slot for slot in range(SLOTS) if slot not in done.slots.tolist()]
    assert torch.equal(done.pools.temporal[:, others], before[:, others])


@pytest.mark.parametrize("snapshots", [False, True], ids=["replay", "snapshots"])
def test_a_commit_off_by_one_is_noticed(random: torch.Generator, snapshots: bool) -> None:
    done = verify(random, requests=4, width=BLOCK, snapshots=snapshots)
    lengths = torch.tensor([1, 4, 9, 15])
    commit(done, snapshots, lengths + 1, None, None)
    with pytest.raises(AssertionError):
        assert_committed(done, done.slots, lengths)


@pytest.mark.parametrize("snapshots", [False, True], ids=["replay", "snapshots"])
def test_the_state_at_a_tracking_boundary_is_kept_aside(
    random: torch.Generator, snapshots: bool
) -> None:
    """Before the last committed token, at it, not at all, and where the slot is gone."""
    done = verify(random, requests=4, width=BLOCK, snapshots=snapshots)
    lengths = torch.tensor([7, 16, 3, 9])
    steps = torch.tensor([2, 15, -1, 4])
    free = [slot for slot in range(1, SLOTS) if slot not in done.slots.tolist()]
    to = torch.tensor([*free[:3], -1])
    before = done.pools.temporal.clone()
    commit(done, snapshots, lengths, to, steps)
    assert_committed(done, done.slots, lengths)
    assert_committed(done, to[:2], steps[:2] + 1)
    assert torch.equal(done.pools.temporal[:, to[2]], before[:, to[2]])
    assert torch.equal(done.pools.temporal[:, -1], before[:, -1]) == (SLOTS - 1 not in done.slots)


def test_plain_decoding_copies_states_at_a_boundary(random: torch.Generator) -> None:
    pools = make_pools(random)
    before = pools.temporal.clone(), pools.conv[0].clone()
    state_copy.track_mamba_states_all_layers(
        pools.conv[0],
        pools.temporal,
        torch.tensor([3, 5, 7, 2]),
        torch.tensor([True, False, True, True]),
        torch.tensor([10, 11, 12, -1]),
        batch_size=4,
    )
    for pool, old in zip((pools.temporal, pools.conv[0]), before, strict=True):
        assert torch.equal(pool[:, [10, 12]], old[:, [3, 7]])
        assert torch.equal(pool[:, [11, SLOTS - 1]], old[:, [11, SLOTS - 1]])
    one = SimpleNamespace(conv=before[1][1].clone(), ssm=before[0][1].clone())
    state_copy.track_mamba_states_if_needed(
        one.conv, one.ssm, torch.tensor([3]), torch.tensor([True]), torch.tensor([10]), 1
    )
    assert torch.equal(one.ssm[10], before[0][1, 3])
