"""The command line: refused before anything starts, with what to give instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.gpu.serve.options import Options, parse
from launch.devices import CPU, GPU


def test_flags_after_two_dashes_go_to_the_servers_of_ones_own_model() -> None:
    options = parse(["M", "D", "--tp", "2", "--", "--mem-fraction-static", "0.8", "--quick"], None)
    assert (options.model, options.drafter, options.tp) == ("M", "D", 2)
    assert options.server_flags == ("--mem-fraction-static", "0.8", "--quick")
    assert options.requests != {1: 3}, "--quick was SGLang's, not ours"


def test_defaults() -> None:
    options = parse([], None)
    assert options.pairs == ("hybrid", "moe")
    assert options.device is GPU
    assert sorted(options.requests) == [1, 8, 32]
    assert options.restart
    assert all(requests >= concurrency for concurrency, requests in options.requests.items())


def test_quick_is_small() -> None:
    options = parse(["--quick", "--cpu"], None)
    assert options.device is CPU
    assert options.requests == {1: 3}
    assert not options.restart


def test_every_request_of_a_load_can_be_in_flight() -> None:
    assert parse(["--concurrency", "32", "1", "--requests", "2"], None).requests == {1: 2, 32: 32}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["M"], "give MODEL and DRAFTER, or neither"),
        (["--tp", "2"], "are for a model of yours"),
        (["--", "--page-size", "16"], "are for a model of yours"),
        (["--pairs", "none"], "nothing to measure"),
        (["M", "D", "--cpu"], "--cpu is for the embedded pairs"),
        (["M", "D", "--", "--log-requests"], "put prompts into the logs"),
        (["M", "D", "--", "--speculative-adaptive-config=x"], "brings its own settings"),
        (["M", "D", "--prompts", "no/such/file"], "there is no such file"),
        (["--out", "no/such/folder/out"], "there is no folder"),
        (["--concurrency", "0"], "must be at least 1"),
        (["--configurations", "nothing"], "invalid choice"),
    ],
)
def test_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(arguments, None)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_report_of_gpu_check_that_is_none_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Else the run would end in an error after an hour, when it packs its archive.
    file = tmp_path / "gpu.json"
    file.write_text("ok      ops")
    with pytest.raises(SystemExit):
        parse(["--gpu-check", str(file)], None)
    assert "no JSON" in capsys.readouterr().err
    file.write_text("{}")
    assert parse(["--gpu-check", str(file)], None).gpu_check == file


def test_a_result_does_not_depend_on_where_it_is_written(tmp_path: Path) -> None:
    def settles(*arguments: str) -> dict[str, object]:
        options: Options = parse(list(arguments), None)
        return options.settles

    assert settles("--out", str(tmp_path)) == settles("--configurations", "fixed", "--trace")
    assert settles("--new-tokens", "8") != settles()
