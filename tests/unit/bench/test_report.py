"""Tables, result files, rooms of several tools and progress, as all tools of bench/ have them."""

import io
import json
from pathlib import Path
from typing import NamedTuple

import pytest

from bench import report
from bench.progress import progress
from launch.report import ROOT

TOOLS = ("draws", "sampled-drafts")


class Row(NamedTuple):
    name: str
    rounds: tuple[float, ...]


def test_numbers_keep_their_format_and_stand_to_the_right() -> None:
    rows: list[dict[str, object]] = [
        {"mode": "plain", "speed-up": "1.00x", "tau": None, "identical": True},
        {"mode": "dflash", "speed-up": "12.50x", "tau": 6, "identical": False},
    ]
    assert report.table(rows).splitlines() == [
        "mode      speed-up    tau  identical",
        "------  ----------  -----  -----------",
        "plain        1.00x      -  yes",
        "dflash      12.50x      6  NO",
    ]
    head, align, first, _ = report.table(rows, markdown=True).splitlines()
    assert [cell.strip() for cell in head.split("|")[1:-1]] == list(rows[0])
    assert [cell.endswith(":") for cell in align.split("|")[1:-1]] == [False, True, True, False]
    assert [cell.strip() for cell in first.split("|")[1:-1]] == ["plain", "1.00x", "-", "yes"]


def test_no_rows_is_said() -> None:
    assert report.table([]) == "(no rows)"


def test_a_result_says_what_it_rests_on_and_names_no_folder_of_the_machine(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    parser = report.new_parser("bench.any", "Any.")
    parser.add_argument("--traces", type=Path, default=report.DATA / "traces.json")
    given = parser.parse_args(["--json", str(file), "--markdown"])
    report.write_json(given, {"rows": [Row("a", (1.0, 2.0))]}, concurrency=8)
    found = json.loads(file.read_text())
    assert found["rows"] == [{"name": "a", "rounds": [1.0, 2.0]}]
    assert found["arguments"] == {"traces": "docs/data/traces.json", "concurrency": 8}
    assert {"machine", "versions", "commit", "time"} < set(found)
    assert str(ROOT) not in file.read_text()


def test_without_a_file_nothing_is_written(tmp_path: Path) -> None:
    given = report.new_parser("bench.any", "Any.").parse_args([])
    report.write_json(given, {"rows": []})
    report.write_rows(None, [{"a": 1}])
    assert list(tmp_path.iterdir()) == []


def test_rows_alone_are_one_a_line(tmp_path: Path) -> None:
    report.write_rows(tmp_path / "rows.json", [{"a": 1}, {"a": 2}])
    assert (tmp_path / "rows.json").read_text() == '[\n{"a": 1},\n{"a": 2}\n]\n'


def test_a_room_lists_its_tools_and_hands_over_the_arguments(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as ended:
        report.run_room("bench.exactness", "The question.", TOOLS, ["--help"])
    listed = capsys.readouterr().out
    assert ended.value.code == 0
    assert "The question." in listed
    for tool in TOOLS:
        assert f"\n  {tool}  " in listed
    from bench.exactness import sampled_drafts

    def main(argv: list[str]) -> int:
        return len(argv)

    monkeypatch.setattr(sampled_drafts, "main", main)
    assert report.run_room("bench.exactness", "", TOOLS, ["sampled-drafts", "--help", "x"]) == 2


@pytest.mark.parametrize("argv", [[], ["unknown"]])
def test_a_room_rejects_an_unknown_tool(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        report.run_room("bench.exactness", "", TOOLS, argv)
    assert ended.value.code == 2


def test_progress_in_a_log_file_is_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()
    monkeypatch.setattr("sys.stderr", log)
    assert list(progress([1, 2, 3], unit="rows")) == [1, 2, 3]
    assert "\r" not in log.getvalue()
    lines = log.getvalue().splitlines()
    assert lines[0].startswith("0 of 3 rows")
    assert lines[-1].startswith("3 of 3 rows")
    assert len(lines) <= 3
