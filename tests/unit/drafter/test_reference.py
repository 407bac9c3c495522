"""The reference drafter against a loop in float64, and the properties serving relies on."""

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_sglang import zoo
from dflash_sglang.drafter.checkpoint import (
    FULL,
    SLIDING,
    CheckpointError,
    DraftConfig,
    load_config,
)
from dflash_sglang.drafter.reference import DraftModel, load_draft, rotate

# Brute force and model both run in float64; they differ by the order of sums only.
TOLERANCE = 1e-10


def small_config(**changes: Any) -> DraftConfig:
    config = DraftConfig(
        hidden_size=24,
        intermediate_size=40,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=8,
        rotary_dim=8,
        vocab_size=50,
        block_size=5,
        target_layer_ids=(0, 2, 3),
        mask_token_id=3,
        num_target_layers=6,
        rope_theta=1000.0,
        rope_type="default",
        rms_norm_eps=1e-6,
        max_position_embeddings=512,
        attention_bias=False,
        layer_types=(FULL, FULL),
        layer_causal=(False, False),
        sliding_window=None,
    )
    return dataclasses.replace(config, **changes)


def random_model(config: DraftConfig) -> DraftModel:
    torch.manual_seed(7)
    model = DraftModel(config).double()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn_like(param) * (0.3 if param.ndim == 2 else 1.0))
    return model


# --- the brute force: one request, one slot, one head, one key at a time --------------------------


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / math.sqrt(float((x * x).mean()) + eps) * weight


def turn(x: Tensor, position: int, config: DraftConfig) -> Tensor:
    out, half = x.clone(), config.rotary_dim // 2
    for i in range(half):
        angle = position / config.rope_theta ** (2 * i / config.rotary_dim)
        a, b = float(x[i]), float(x[i + half])
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def brute_force(
    model: DraftModel, block: Tensor, first: int, taps: Tensor, taps_first: int = 0
) -> Tensor:
    """Block [block, hidden] at `first` ..., taps [ctx, taps * hidden] at `taps_first` ..."""
    c = model.config
    state = [norm(model.fc.weight @ tap, model.hidden_norm.weight, c.rms_norm_eps) for tap in taps]
    x = [row.clone() for row in block]
    layers: Any = model.layers
    for index, layer in enumerate(layers):
        a = layer.self_attn
        entries = [(taps_first + i, s) for i, s in enumerate(state)]
        inputs = [norm(row, layer.input_layernorm.weight, c.rms_norm_eps) for row in x]
        entries += [(first + i, row) for i, row in enumerate(inputs)]
        attended = []
        for slot, row in enumerate(inputs):
            heads = []
            for head in range(c.num_heads):
                kv_head = head // (c.num_heads // c.num_kv_heads)
                part = slice(head * c.head_dim, (head + 1) * c.head_dim)
                kv_part = slice(kv_head * c.head_dim, (kv_head + 1) * c.head_dim)
                query = norm(a.q_proj.weight[part] @ row, a.q_norm.weight, c.rms_norm_eps)
                query = turn(query, first + slot, c)
                scores, values = [], []
                for position, source in entries:
                    behind = first + slot - position
                    window = c.window_of(index)
                    if (window is not None and behind >= window) or (
                        c.layer_causal[index] and behind < 0
                    ):
                        continue
                    key = norm(a.k_proj.weight[kv_part] @ source, a.k_norm.weight, c.rms_norm_eps)
                    key = turn(key, position, c)
                    scores.append(math.exp(float(query @ key) / math.sqrt(c.head_dim)))
                    values.append(a.v_proj.weight[kv_part] @ source)
                weighted = [s * v for s, v in zip(scores, values, strict=True)]
                heads.append(torch.stack(weighted).sum(dim=0) / sum(scores))
            attended.append(a.o_proj.weight @ torch.cat(heads))
        x = [row + more for row, more in zip(x, attended, strict=True)]
        for slot, row in enumerate(x):
            m = norm(row, layer.post_attention_layernorm.weight, c.rms_norm_eps)
            gate, up = layer.mlp.gate_proj.weight @ m, layer.mlp.up_proj.weight @ m
            x[slot] = row + layer.mlp.down_proj.weight @ (gate / (1 + torch.exp(-gate)) * up)
    return torch.stack([norm(row, model.norm.weight, c.rms_norm_eps) for row in x])


def drafted(model: DraftModel, block: Tensor, first: int, taps: Tensor) -> Tensor:
    """The model on one request whose context is positions 0 .. first - 1."""
    positions = first + torch.arange(len(block))[None]
    behind = torch.arange(len(taps))[None]
    context = model.context_kv(taps[None], behind)
    return model(block[None], positions, context, behind)[0]


def random_inputs(config: DraftConfig, block: int, context: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    taps = torch.randn(context, config.context_size, generator=generator, dtype=torch.float64)
    rows = torch.randn(block, config.hidden_size, generator=generator, dtype=torch.float64)
    return rows, taps


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rotary_dim": 4},  # partial rotation: the rest of a head is left alone
        {"num_heads": 2, "num_kv_heads": 2},  # no grouping
        {"target_layer_ids": (1,)},
        {"layer_types": (SLIDING, FULL), "layer_causal": (True, False), "sliding_window": 4},
        {"layer_types": (SLIDING, SLIDING), "layer_causal": (False, False), "sliding_window": 3},
        {"layer_types": (FULL, SLIDING), "layer_causal": (False, True), "sliding_window": 1},
        {"layer_types": (SLIDING, SLIDING), "layer_causal": (True, True), "sliding_window": 100},
    ],
    ids=lambda changes: "-".join(f"{k}={v}" for k, v in changes.items()) or "plain",
)
@torch.no_grad()
def test_equals_brute_force(changes: dict[str, object]) -> None:
    config = small_config(**changes)
    model = random_model(config)
    block, taps = random_inputs(config, block=5, context=7)
    torch.testing.assert_close(
        drafted(model, block, 7, taps),
        brute_force(model, block, 7, taps),
        atol=TOLERANCE,
        rtol=TOLERANCE,
    )


@pytest.mark.parametrize(("block", "context"), [(2, 1), (5, 0), (3, 33)])
@torch.no_grad()
def test_odd_sizes_equal_brute_force(block: int, context: int) -> None:
    """Smallest block, no context at all, context far longer than the block."""
    config = small_config()
    model = random_model(config)
    rows, taps = random_inputs(config, block, context)
    torch.testing.assert_close(
        drafted(model, rows, context, taps),
        brute_force(model, rows, context, taps),
        atol=TOLERANCE,
        rtol=TOLERANCE,
    )


@torch.no_grad()
def test_padding_changes_nothing() -> None:
    """Requests of different lengths in one batch: hidden context entries must have no effect."""
    config = small_config()
    model = random_model(config)
    block, taps = random_inputs(config, block=5, context=9)
    lengths = (9, 4)
    padded = taps.repeat(2, 1, 1)
    padded[1, 4:] = float("1e3")  # would be seen at once
    behind = torch.arange(9).expand(2, -1)
    valid = behind < torch.tensor(lengths)[:, None]
    positions = torch.tensor(lengths)[:, None] + torch.arange(5)
    context = model.context_kv(padded, behind)
    both = model(block.expand(2, -1, -1), positions, context, behind, valid)
    for row, length in enumerate(lengths):
        alone = drafted(model, block, length, taps[:length])
        torch.testing.assert_close(both[row], alone, atol=TOLERANCE, rtol=TOLERANCE)


@torch.no_grad()
def test_context_in_chunks_equals_context_at_once() -> None:
    """What serving does: a chunk or a commit appends keys at its own positions."""
    config = small_config()
    model = random_model(config)
    _, taps = random_inputs(config, block=1, context=9)
    behind = torch.arange(9)[None]
    whole = model.context_kv(taps[None], behind)
    pieces = [model.context_kv(taps[None, s], behind[:, s]) for s in (slice(0, 4), slice(4, 9))]
    for layer in range(config.num_layers):
        for field in ("key", "value"):
            joined = torch.cat([getattr(piece[layer], field) for piece in pieces], dim=1)
            expected = getattr(whole[layer], field)
            torch.testing.assert_close(joined, expected, atol=TOLERANCE, rtol=TOLERANCE)


@torch.no_grad()
def test_only_distances_matter() -> None:
    """Shifting all positions together changes nothing; shifting the block alone does."""
    config = small_config()
    model = random_model(config)
    block, taps = random_inputs(config, block=5, context=7)
    behind, positions = torch.arange(7)[None], 7 + torch.arange(5)[None]

    def at(context_shift: int, block_shift: int) -> Tensor:
        moved = behind + context_shift
        context = model.context_kv(taps[None], moved)
        return model(block[None], positions + block_shift, context, moved)

    torch.testing.assert_close(at(100, 100), at(0, 0), atol=TOLERANCE, rtol=TOLERANCE)
    assert (at(0, 1) - at(0, 0)).abs().max() > 1e-3


def test_rotation_at_position_zero_is_the_identity_and_keeps_lengths() -> None:
    config = small_config(rotary_dim=4)
    x = torch.randn(1, 3, 2, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    turned = rotate(x, torch.tensor([[0, 1, 77]]), config)
    torch.testing.assert_close(turned[:, 0], x[:, 0], atol=0, rtol=0)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), atol=1e-12, rtol=0)
    torch.testing.assert_close(turned[..., 4:], x[..., 4:], atol=0, rtol=0)
    assert (turned[:, 2] - x[:, 2]).abs().max() > 1e-3


@torch.no_grad()
def test_a_smaller_block_is_not_a_prefix_of_a_larger_one() -> None:
    """Full layers see the later masks: a server must draft with the width it verifies."""
    config = small_config()
    model = random_model(config)
    block, taps = random_inputs(config, block=5, context=7)
    short = drafted(model, block[:3], 7, taps)
    assert (short - drafted(model, block, 7, taps)[:3]).abs().max() > 1e-3


def test_block_ids_hold_the_anchor_then_masks() -> None:
    model = random_model(small_config())
    ids = model.block_ids(torch.tensor([11, 12]), 4)
    assert ids.tolist() == [[11, 3, 3, 3], [12, 3, 3, 3]]


def test_scaled_rotary_embeddings_are_refused() -> None:
    with pytest.raises(CheckpointError, match="rope_type 'default' only, got 'yarn'"):
        DraftModel(small_config(rope_type="yarn"))


def test_loading_is_strict(tmp_path: Path) -> None:
    source = zoo.path("moe").drafter
    assert load_draft(source).config == load_config(source)
    shutil.copytree(source, tmp_path / "drafter")
    file = tmp_path / "drafter" / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["num_hidden_layers"] = 3
    file.write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"missing tensor layers\.2\."):
        load_draft(tmp_path / "drafter")
