"""The presets for SGLang's --config: every key is a flag, the checks pass, the memory adds up."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sglang.srt.arg_groups.model_override_base import resolving_view

from bench.memory.recurrent_state import BLOCK, H200, LENGTH, QWEN36, Budget
from dflash_sglang.preflight.server_flags import check_start

LAUNCH = Path(__file__).parents[3] / "launch" / "presets"


class Preset(NamedTuple):
    """A preset and the memory of one of its GPUs."""

    file: Path
    budget: Budget
    ranks: int  # that share the layers' heads


# 80 GB: FP8 weights take a byte a parameter, two GPUs half of the bfloat16 weights each.
PRESETS = (
    Preset(LAUNCH / "qwen3.6-35b-a3b.yaml", H200, 1),
    Preset(
        LAUNCH / "qwen3.6-35b-a3b-fp8.yaml",
        H200._replace(memory=80e9, fraction=0.85, weights=35e9 + 2 * 0.47e9),
        1,
    ),
    Preset(
        LAUNCH / "qwen3.6-35b-a3b-tp2.yaml",
        H200._replace(memory=80e9, fraction=0.85, weights=H200.weights / 2),
        2,
    ),
)


def test_every_preset_is_looked_at() -> None:
    assert {preset.file for preset in PRESETS} == set(LAUNCH.glob("*.yaml"))


def flags(preset: Preset, *args: str) -> Any:
    from sglang.srt.server_args import prepare_server_args

    return resolving_view(prepare_server_args(["--config", str(preset.file), *args]))


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.file.stem)
def test_sglang_reads_it_and_the_checks_at_start_pass(
    preset: Preset, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))  # the pair itself is not on this machine
    given = flags(preset)
    check_start(given, {})
    assert given.speculative_algorithm == "DFLASH"
    assert given.tp_size == preset.ranks
    assert given.mem_fraction_static == preset.budget.fraction
    check_start(flags(preset, "--enable-linear-replayssm-spec"), {})


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.file.stem)
def test_its_running_requests_fit(preset: Preset) -> None:
    layers = QWEN36._replace(
        key_heads=QWEN36.key_heads // preset.ranks, heads=QWEN36.heads // preset.ranks
    )
    snapshots = preset.budget.requests_by_default(layers, BLOCK)
    assert flags(preset).max_running_requests <= snapshots
    (promised,) = re.findall(r"(\d+) requests fit", preset.file.read_text())
    replay = preset.budget.requests_by_default(layers, BLOCK, LENGTH, asked=int(promised))
    assert 1.5 * snapshots < int(promised) <= replay
