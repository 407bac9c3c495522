"""What a TF32 replay adds to a state, beside bfloat16 activations; and its rounding, bit by bit."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from bench.harness.server_side import tf32_replay
from bench.rollback import prompts, states, tf32
from bench.rollback.states import ACTIVATIONS, SNAPSHOTS, measure, sequential, shares
from bench.rollback.tf32 import Products
from bench.rollback.tokens import Size, commit_lens, tokens
from dflash_sglang.cpu.gated_delta import replay
from dflash_sglang.cpu.gated_delta.delta_rule import TokenBlock, apply_updates, run_block

SMALL = Size(key_heads=2, heads=4, dim=64)
ULP = 2.0**-10  # of TF32, at 1


@pytest.mark.parametrize(
    ("value", "truncated", "nearest"),
    [
        (1.0, 1.0, 1.0),
        (1 + 0.499 * ULP, 1.0, 1.0),
        (1 + 0.5 * ULP, 1.0, 1 + ULP),  # a tie: away from zero
        (1 + 0.999 * ULP, 1.0, 1 + ULP),
        (-1 - 0.999 * ULP, -1.0, -1 - ULP),
        (2 - 0.25 * ULP, 2 - ULP, 2.0),  # into the exponent
        (0.0, 0.0, 0.0),
    ],
)
def test_operands_keep_ten_bits(value: float, truncated: float, nearest: float) -> None:
    given = torch.tensor(value)
    assert tf32.tf32(given, Products.TRUNCATED).item() == truncated
    assert tf32.tf32(given, Products.NEAREST).item() == nearest
    assert tf32.tf32(given, Products.FLOAT32) is given


def test_two_parts_hold_sixteen_bits() -> None:
    given = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    error = ((tf32.two_parts(given) - given) / given).abs().max()
    assert 2.0**-20 < float(error) < 2.0**-16


def some_block(length: int) -> tuple[torch.Tensor, TokenBlock]:
    random = torch.Generator().manual_seed(1)
    state = torch.randn(1, 4, 64, 64, generator=random)
    query, key = torch.randn(2, 1, 2, length, 64, generator=random) / 8
    value = torch.randn(1, 4, length, 64, generator=random)
    decay, beta = -torch.rand(1, 4, length, generator=random), torch.rand(1, 4, length)
    return state, TokenBlock(query, key, value, decay, beta)


def test_the_reference_of_snapshots_is_the_recurrence() -> None:
    state, block = some_block(7)
    outputs, after = sequential(state, block)
    expected, updates = run_block(state.double(), TokenBlock(*(part.double() for part in block)))
    assert torch.allclose(outputs.double(), expected, atol=1e-5)
    assert torch.allclose(after.double(), apply_updates(state.double(), updates), atol=1e-5)


def test_without_rounding_a_replay_is_the_recurrence() -> None:
    state, block = some_block(7)
    outputs, after = sequential(state, block)
    read, updates = tf32.verify(state, block, Products.FLOAT32)
    assert torch.allclose(read, outputs, atol=1e-5)
    assert torch.allclose(tf32.commit(state, updates), after, rtol=1e-4, atol=1e-4)


def test_the_record_holds_keys_that_were_not_rounded() -> None:
    state, block = some_block(3)
    _, updates = tf32.verify(state, block, Products.TRUNCATED)
    assert updates.key is block.key


def test_tf32_adds_less_than_bfloat16_activations_cause() -> None:
    """Docs and the default of `rollback` rest on it; the long run is docs/data's."""
    for regime in states.REGIMES:
        rows = measure(SMALL, regime, [40, 120])
        assert {row["error"] for row in rows} >= {ACTIVATIONS, SNAPSHOTS}
        for row in shares(rows):
            most = 0.5 if "truncated" in row["error"] or "nearest" in row["error"] else 0.01
            assert max(row["state share"], row["output share"]) < most
            if "truncated" in row["error"]:  # else nothing was rounded
                assert min(row["state share"], row["output share"]) > 0.05


def test_a_record_in_one_part_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf32, "two_parts", lambda x, dtype: x.to(dtype).float())
    rows = measure(SMALL, "convolved tokens", [40])
    added = {row["error"]: row for row in shares(rows)}
    assert added["replay, float32"]["state share"] > 0.3


def test_tokens_come_in_recorded_lengths() -> None:
    lengths = commit_lens(500)
    assert len(lengths) == 500
    assert set(lengths) <= set(range(1, 17))
    assert len(set(lengths)) > 10
    drawn = list(tokens(SMALL, 20, convolve=True))
    assert [one.value.shape[2] for one in drawn] == lengths[:20]
    assert all(math.isfinite(part.sum()) for one in drawn for part in one)


def test_half_lives_cover_four_orders() -> None:
    rates = SMALL.a_log().exp()
    assert float(rates[0] / rates[-1]) == pytest.approx(10_000, rel=1e-3)
    assert all(one > other for one, other in pairwise(rates.tolist()))


def answer(ids: str, gap: float = 1.0, shift: float = 0.0) -> prompts.Answer:
    """One of as many tokens as letters, all as likely, and as much likelier than the next."""
    return prompts.Answer(tuple(map(ord, ids)), (-0.5 - shift,) * len(ids), (gap,) * len(ids), 1)


def test_answers_are_compared_up_to_their_first_difference() -> None:
    """A difference behind the first, where the texts have parted, is no evidence of anything."""
    other = prompts.MODES[1]
    found = {
        prompts.REFERENCE: [answer("same"), answer("abcd", gap=0.25), answer("long")],
        other: [answer("same", shift=0.125), answer("abxy", shift=0.5), answer("longer", shift=1)],
    }
    row = prompts.compare(other, prompts.REFERENCE, found)
    assert (row["prompts"], row["identical"], row["verifies"]) == (3, 1, 3)
    assert row["gaps"] == [0.25, 1.0]
    # Four tokens of the first answer, two of the second, four of the third.
    assert row["shift median"] == pytest.approx(0.5)
    assert row["shift 99 %"] == pytest.approx(1.0)


def test_an_emulation_reaches_the_server(tmp_path: Path) -> None:
    (mode,) = (m for m in prompts.MODES if m.dtype == "float32" and m.products == "nearest")
    server = mode.server(tmp_path)
    assert server.env["DFLASH_TF32"] == "nearest"
    assert "tf32_replay" in next(tmp_path.rglob("entry_points.txt")).read_text()
    plain = prompts.Mode("float32", "replay").server(tmp_path / "plain")
    assert "DFLASH_TF32" not in plain.env


def test_the_plugin_rounds_what_a_verify_of_the_cpu_platform_multiplies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replay, "run_block", run_block)  # restored at the end of the test
    state, block = some_block(5)
    monkeypatch.setenv(tf32_replay.TF32, "truncated")
    tf32_replay.round_products()
    outputs, _ = vars(replay)["run_block"](state, block)
    assert torch.equal(outputs, tf32.verify(state, block, Products.TRUNCATED)[0])
    assert not torch.equal(outputs, run_block(state, block)[0])


def test_a_run_compares_every_server_and_names_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    def answers_of(mode: prompts.Mode, texts: list[str], folder: Path) -> list[prompts.Answer]:
        asked.append(mode)
        return [answer("ab") for _ in texts]

    monkeypatch.setattr(prompts, "answers_of", answers_of)
    file = tmp_path / "result.json"
    given = ["--prompts", "3", "--servers", "4", "--keep", str(tmp_path), "--json", str(file)]
    assert prompts.main(given) == 0
    assert asked == prompts.MODES[:4]
    text = file.read_text()
    assert str(tmp_path) not in text
    assert [row["identical"] for row in json.loads(text)["rows"]] == [3] * 4
