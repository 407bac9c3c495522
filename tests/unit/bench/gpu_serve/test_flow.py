"""The whole run with stub servers: what is measured, what a failure or Ctrl-C leaves behind."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.gpu.serve import __main__ as tool
from dflash_sglang import zoo
from tests.support.fake_gpu import fake_gpu
from tests.unit.bench.gpu_serve.stub import Script

Results = Callable[[], Any]


def run_of(results: Any, configuration: str) -> Any:
    (found,) = (run for run in results["runs"] if run["configuration"] == configuration)
    return found


def test_every_configuration_is_measured_at_every_concurrency(
    run: Callable[..., int], results: Results, script: Script, tmp_path: Path
) -> None:
    assert run("--concurrency", "1", "2") == 0
    found = results()
    names = [one["configuration"] for one in found["runs"]]
    assert names[:4] == ["plain", "builtin", "fixed", "adaptive"]
    for one in found["runs"]:
        loads = [(load["sampling"], load["concurrency"]) for load in one["loads"]]
        assert loads == [("greedy", 1), ("greedy", 2), ("default", 1), ("default", 2)]
        assert one["start"]["cold"]["longest_gap_ms"] > 0
        # 9 tokens: one of prefill, then verifies of 4 and 4.
        assert {load["tau"] for load in one["loads"]} == {
            1.0 if one["configuration"] == "plain" else 4.0
        }
    ours = run_of(found, "adaptive")["loads"][0]
    assert ours["steps_by_width"] == {"4": 3 * 2}
    assert (ours["equal"], ours["compared"]) == (3, 3)
    report = (tmp_path / "out" / "report.md").read_text()
    assert "| adaptive" in report
    assert "No number here says anything of a GPU" in report


def test_servers_differ_in_the_worker_and_its_settings_alone(
    run: Callable[..., int], script: Script
) -> None:
    run("--concurrency", "1")
    assert script.modes[:4] == ["plain", "builtin", "fixed", "adaptive"]
    assert script.started[3].settings == {}
    commands = [
        [word for word in server.command if word != str(server.port) and "settings" not in word]
        for server in script.started
    ]
    assert commands[1] == commands[3]
    assert commands[2] == [*commands[3], "--speculative-adaptive-config"]


def test_each_server_starts_with_an_empty_triton_cache_of_its_own(
    run: Callable[..., int], script: Script
) -> None:
    # Else the gap of a cold start is that of the first configuration only.
    run("--concurrency", "1")
    folders = [server.env["TRITON_CACHE_DIR"] for server in script.started]
    assert len(set(folders)) == len(folders)


def test_replay_is_measured_where_there_are_recurrent_layers(
    run: Callable[..., int], results: Results, script: Script
) -> None:
    run("--concurrency", "1", "--pairs", "moe", "hybrid", "--configurations", "plain", "replay")
    measured = [(one["pair"], one["configuration"]) for one in results()["runs"]]
    assert measured == [("moe", "plain"), ("hybrid", "plain"), ("hybrid", "replay")]
    assert script.started[-1].settings == {"rollback": "replay"}


def test_a_server_that_fails_is_a_row_with_its_last_lines_and_advice(
    run: Callable[..., int], results: Results, script: Script, tmp_path: Path
) -> None:
    script.fails["fixed"] = "torch.OutOfMemoryError: CUDA out of memory"
    assert run("--concurrency", "1") == 1
    failed = run_of(results(), "fixed")
    assert failed["status"] == "failed"
    assert "the server exited with status 1" in failed["error"]
    assert "CUDA out of memory" in failed["error"]
    assert "--mem-fraction-static" in failed["advice"]
    assert run_of(results(), "adaptive")["status"] == "ok"
    report = (tmp_path / "out" / "report.md").read_text()
    assert "**fixed failed.** Lower --mem-fraction-static" in report


def test_without_plain_answers_nothing_is_called_equal_to_them(
    run: Callable[..., int], results: Results, script: Script
) -> None:
    script.fails["plain"] = "killed"
    assert run("--concurrency", "1", "2", "--configurations", "plain", "adaptive") == 1
    assert all("equal" not in load for load in run_of(results(), "adaptive")["loads"])


def test_plain_decoding_is_compared_with_its_own_lowest_concurrency(
    run: Callable[..., int], results: Results
) -> None:
    run("--concurrency", "1", "2", "--configurations", "plain")
    alone, together, *_ = run_of(results(), "plain")["loads"]
    assert "equal" not in alone
    assert (together["equal"], together["compared"]) == (3, 3)


def test_any_error_of_a_configuration_leaves_the_others(
    run: Callable[..., int], results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(log: str) -> None:
        raise KeyError("a line that nobody expected")

    monkeypatch.setattr("bench.gpu.serve.server_log.memory", broken)
    assert run("--concurrency", "1", "--configurations", "plain", "fixed") == 1
    assert [one["status"] for one in results()["runs"]] == ["failed", "failed"]
    assert "KeyError" in run_of(results(), "fixed")["error"]


def test_an_answer_that_breaks_off_fails_its_configuration_only(
    run: Callable[..., int], results: Results, script: Script
) -> None:
    script.breaks.add("builtin")
    assert run("--concurrency", "1") == 1
    assert "without [DONE]" in run_of(results(), "builtin")["error"]
    assert run_of(results(), "adaptive")["status"] == "ok"


def test_our_numbers_are_never_those_of_the_worker_of_sglang(
    run: Callable[..., int], results: Results, script: Script
) -> None:
    script.falls_back = True
    assert run("--concurrency", "1") == 1
    failed = run_of(results(), "adaptive")
    assert "SGLang's own worker serves instead of ours" in failed["error"]
    assert failed["loads"] == []


def test_ctrl_c_keeps_what_was_measured_and_the_next_run_goes_on(
    run: Callable[..., int], results: Results, script: Script, tmp_path: Path
) -> None:
    script.interrupts = "fixed"
    assert run("--concurrency", "1") == 130
    statuses = [(one["configuration"], one["status"]) for one in results()["runs"]]
    assert statuses == [("plain", "ok"), ("builtin", "ok"), ("fixed", "interrupted")]
    assert (tmp_path / "out" / "report.zip").exists()
    assert script.started[-1].http is None, "a server was left running"
    script.interrupts = None
    script.started.clear()
    assert run("--concurrency", "1") == 0
    assert script.modes[:2] == ["fixed", "adaptive"]
    assert run_of(results(), "fixed")["loads"][0]["compared"] == 3, "plain's answers were kept"


def test_results_of_other_options_are_not_mixed(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--concurrency", "1", "--configurations", "plain"]
    assert run(*arguments) == 0
    assert run(*arguments, "--new-tokens", "8") == 2
    assert "Give another --out, or --fresh" in capsys.readouterr().err
    assert run(*arguments, "--new-tokens", "8", "--fresh") == 0


def test_a_difference_comes_with_its_place_and_gap(
    run: Callable[..., int], results: Results, script: Script, tmp_path: Path
) -> None:
    same = script.answer

    def answer(mode: str, prompt: Sequence[int]) -> list[int]:
        output = same(mode, prompt)
        return [*output[:5], 99, *output[6:]] if mode == "fixed" else output

    script.answer = answer
    script.gap = 0.3
    assert run("--concurrency", "1") == 0, "in bfloat16 equality is not required"
    load = run_of(results(), "fixed")["loads"][0]
    assert (load["equal"], load["compared"]) == (0, 3)
    assert load["first"] == {"prompt": 0, "token": 5, "gap": 0.3}
    assert load["largest_gap"] == 0.3
    assert "token 5 of answer 1, gap 0.300" in (tmp_path / "out" / "report.md").read_text()


def test_a_warm_start_follows_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, script: Script, results: Results, tmp_path: Path
) -> None:
    fake_gpu(monkeypatch)
    arguments = ["--pairs", "moe", "--requests", "1", "--concurrency", "1", "--new-tokens", "9"]
    chosen = ["--configurations", "plain", "adaptive"]
    assert tool.main([*arguments, *chosen, "--out", str(tmp_path / "out")]) == 0
    assert script.modes == ["plain", "adaptive", "adaptive"]
    first, second = script.started[1:]
    assert first.env["TRITON_CACHE_DIR"] == second.env["TRITON_CACHE_DIR"]
    assert "--dtype bfloat16" in " ".join(first.command)
    assert run_of(results(), "adaptive")["start"]["restart"]["longest_gap_ms"] > 0


def test_a_pair_of_ones_own_is_served_with_its_flags_and_stays_private(
    monkeypatch: pytest.MonkeyPatch, script: Script, results: Results, tmp_path: Path
) -> None:
    fake_gpu(monkeypatch)
    folder = tmp_path / "secret-model"
    folder.symlink_to(zoo.path("hybrid").verifier)
    questions = tmp_path / "questions.txt"
    questions.write_text("Where is the gold?\n")
    arguments = ["--pairs", "none", "--concurrency", "1", "--requests", "2", "--name", "mine"]
    arguments += ["--configurations", "replay", "--prompts", str(questions)]
    models = [str(folder), str(zoo.path("hybrid").drafter)]
    out = ["--out", str(tmp_path / "out"), "--", "--page-size", "16"]
    assert tool.main([*models, *arguments, *out]) == 0
    assert [(run["pair"], run["configuration"]) for run in results()["runs"]] == [
        ("mine", "plain"),
        ("mine", "replay"),
    ]
    for server in script.started:
        assert server.command[server.command.index("--page-size") + 1] == "16"
        assert "--max-running-requests" not in server.command, "SGLang's own limits"
        assert server.env["HF_HUB_OFFLINE"] == "0"
        assert server.env.get("CUDA_VISIBLE_DEVICES") != ""
    with zipfile.ZipFile(tmp_path / "out" / "report.zip") as archive:
        text = "".join(archive.read(name).decode() for name in archive.namelist())
    assert "secret-model" not in text
    assert "gold" not in text
    assert not [name for name in archive.namelist() if "answers" in name]


def test_without_a_gpu_nothing_starts_and_the_error_says_what_to_do(
    script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main(["--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "torch finds no accelerator" in error
    assert "--cpu --quick" in error
    assert script.started == []


def test_the_archive_is_one_file_with_everything_but_answers(
    run: Callable[..., int], script: Script, tmp_path: Path
) -> None:
    run("--concurrency", "1", "--configurations", "plain", "adaptive")
    with zipfile.ZipFile(tmp_path / "out" / "report.zip") as archive:
        names = archive.namelist()
        text = "".join(archive.read(name).decode() for name in names)
    assert {"results.json", "report.md", "environment.json"} <= set(names)
    assert "logs/moe-adaptive/server.log" in names
    assert "secret answer" not in text
    assert "private-model" not in text
    assert str(tmp_path) not in text
