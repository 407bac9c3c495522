"""Rows, table and JSON of the demo."""

import json

import pytest

from launch import report
from launch.client import Answer
from launch.load import Load
from launch.report import Pass

BLOCKS = {"plain": 1, "builtin": 16, "dflash": 16}
KEYS = ["mode", "concurrency", "block_size", "tokens_per_s", "tau", "speedup", "identical"]


def make_pass(
    mode: str, concurrency: int, seconds: float, ids: tuple[int, ...] = (1, 2, 3, 4, 5)
) -> Pass:
    meta = {"completion_tokens": len(ids)}
    if mode != "plain":
        meta["spec_verify_ct"] = 1 if mode == "dflash" else 2
    same = Answer("", ids, meta)
    return Pass(mode, concurrency, Load((same, same), seconds))


@pytest.fixture
def passes() -> list[Pass]:
    plain = [make_pass("plain", 1, seconds) for seconds in (10, 20, 1)]  # 1, 0.5, 10 tokens/s
    return [
        *plain,
        make_pass("plain", 8, 5.0),
        make_pass("builtin", 1, 5.0),
        make_pass("builtin", 8, 5.0),
        make_pass("dflash", 1, 2.5),
        make_pass("dflash", 8, 1.0),
    ]


def test_rows(passes: list[Pass]) -> None:
    rows = report.summarize(passes, passes[0].load, BLOCKS)
    assert [(row.mode, row.concurrency) for row in rows] == [
        (mode, concurrency) for mode in ("plain", "builtin", "dflash") for concurrency in (1, 8)
    ]
    ours = rows[4]
    assert (ours.block_size, ours.tokens_per_s, ours.tau, ours.speedup) == (16, 4.0, 4.0, 4.0)
    assert rows[5].speedup == 5.0, "over plain at the same concurrency"
    assert rows[2].tau == 2.0
    assert rows[0][2:6] == (1, 1.0, 1.0, 1.0), "median of the rounds, not their mean"
    assert all(row.identical for row in rows)


def test_one_differing_round_is_seen(passes: list[Pass]) -> None:
    passes.insert(7, make_pass("dflash", 1, 2.5, ids=(1, 2, 3, 4, 9)))
    rows = report.summarize(passes, passes[0].load, BLOCKS)
    assert [row.identical for row in rows] == [True, True, True, True, False, True]
    assert "NO" in report.table(rows, passes)


def test_json_keys(passes: list[Pass]) -> None:
    rows = report.summarize(passes, passes[0].load, BLOCKS)
    result = json.loads(json.dumps(report.as_json(rows, passes, ["code", "add"], {"rounds": 3})))
    assert [list(row) for row in result["rows"]] == [KEYS] * 6
    assert {row["mode"] for row in result["rows"]} == {"plain", "builtin", "dflash"}
    assert result["rows"][4]["identical"] is True
    assert result["rounds"][0]["tokens_per_s"] == [1.0, 0.5, 10.0]
    assert result["tau_by_family"]["dflash"] == {"code": 4.0, "add": 4.0}
    assert set(result["provenance"]) == {"machine", "versions", "commit", "time", "arguments"}
    assert result["provenance"]["versions"]["sglang"] == "0.5.23"


def test_table_shows_the_spread(passes: list[Pass]) -> None:
    lines = report.table(report.summarize(passes, passes[0].load, BLOCKS), passes).splitlines()
    assert len(lines) == 7
    assert len(set(map(len, lines))) == 1, "columns are not aligned"
    assert "0..10" in lines[1]
