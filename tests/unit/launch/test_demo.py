"""The demo's options, choice of prompts, modes and exit status; the servers are stubs."""

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from dflash_sglang import zoo
from dflash_sglang.config import read_settings
from launch import comparison, demo, on_gpu
from launch.client import Answer
from launch.comparison import Comparison, ComparisonError, Options
from launch.devices import CPU, GPU
from launch.load import Load
from launch.report import PLAIN, Pass
from launch.serving import Server
from tests.support.fake_gpu import fake_gpu
from tests.unit.launch.stub_server import Canned, serve


class FakeServer:
    """What the demo does with a server, without one."""

    pid = 1234
    url = "http://127.0.0.1:1"

    def __init__(self, log_path: Path) -> None:
        self.log_path = log_path
        self.stopped = 0

    def start(self) -> None:
        self.log_path.write_text("DFLASH worker of dflash_sglang ready: block_size=16\n")

    def wait_ready(self, on_wait: Callable[[float], None]) -> None:
        on_wait(1.0)

    def stop(self) -> None:
        self.stopped += 1

    def discard_log(self) -> None:
        pass


def run_demo(
    monkeypatch: pytest.MonkeyPatch,
    server: FakeServer,
    arguments: Sequence[str],
    dflash_ids: Callable[[str], list[int]] = lambda _: [1, 2, 3],
) -> int:
    """Runs the demo with canned answers: plain answers 1 2 3, DFLASH as `dflash_ids`."""

    def compare(options: Options, prompts: Sequence[str], stack: ExitStack) -> Comparison:
        stack.callback(server.stop)
        passes: list[Pass] = []
        replies: dict[str, Callable[[str], Canned]] = {
            "plain": lambda _: Canned([1, 2, 3]),
            "dflash": lambda prompt: Canned(dflash_ids(prompt), verify_count=1),
        }
        for mode, reply in replies.items():
            with serve(reply) as stub:
                passes += comparison.measure({mode: stub.client}, prompts, options)  # type: ignore[dict-item]
        return Comparison(passes, server)  # type: ignore[arg-type]

    monkeypatch.setattr(demo, "compare", compare)
    return demo.run(demo.parse(arguments))


@pytest.fixture
def server(tmp_path: Path) -> FakeServer:
    return FakeServer(tmp_path / "server.log")


def test_identical_answers(
    monkeypatch: pytest.MonkeyPatch, server: FakeServer, tmp_path: Path
) -> None:
    file = tmp_path / "result.json"
    assert run_demo(monkeypatch, server, ["--json", str(file), "--rounds", "2"]) == 0
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    assert [(row["mode"], row["concurrency"], row["identical"]) for row in rows] == [
        ("plain", 1, True),
        ("plain", 8, True),
        ("dflash", 1, True),
        ("dflash", 8, True),
    ]
    assert [row["tau"] for row in rows] == [1.0, 1.0, 2.0, 2.0]
    assert server.stopped == 1


def test_exit_status_1_and_the_first_difference(
    monkeypatch: pytest.MonkeyPatch,
    server: FakeServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wrong = comparison.choose_prompts("moe", 8)[5].text
    file = tmp_path / "result.json"

    def dflash_ids(prompt: str) -> list[int]:
        return [1, 2, 7] if prompt == wrong else [1, 2, 3]

    arguments = ["--json", str(file), "--prompts", "8", "--serve"]
    assert run_demo(monkeypatch, server, arguments, dflash_ids) == 1
    assert [row["identical"] for row in json.loads(file.read_text())["rows"]] == [
        *(True, True),
        *(False, False),
    ]
    out, err = capsys.readouterr()
    assert f"differs from plain at token 2 of its answer to {wrong!r}" in err
    assert server.stopped == 1, "a server that answers wrongly must not be left running"
    assert "curl" not in out


def test_serve_leaves_the_server_and_prints_a_request_and_how_to_stop_it(
    monkeypatch: pytest.MonkeyPatch, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_demo(monkeypatch, server, ["--serve", "--rounds", "1"]) == 0
    assert server.stopped == 0
    out = capsys.readouterr().out
    assert "kill 1234" in out
    assert "curl -s http://127.0.0.1:1/v1/chat/completions" in out


def test_server_that_does_not_speculate_is_an_error(
    server: FakeServer,
) -> None:
    with serve(lambda _: Canned([1, 2, 3])) as stub:
        stub.client.log_path = server.log_path  # type: ignore[attr-defined]
        passes = comparison.measure({"dflash": stub.client}, ["a"], OPTIONS)  # type: ignore[dict-item]
        with pytest.raises(ComparisonError, match="does not speculate"):
            list(passes)


OPTIONS = Options("moe", concurrency=(1,), block_size=16, rounds=1, with_builtin=False, serve=False)


def test_fallback_to_the_worker_of_sglang_is_an_error(server: FakeServer, tmp_path: Path) -> None:
    # A row of SGLang's own worker must never be printed under our name.
    comparison.start(server, "dflash")  # type: ignore[arg-type]
    server.start = lambda: server.log_path.write_text("SGLang's own worker serves")  # type: ignore
    with pytest.raises(ComparisonError, match="own worker serves instead of ours"):
        comparison.start(server, "dflash")  # type: ignore[arg-type]
    comparison.start(server, "builtin")  # type: ignore[arg-type]


def test_modes_differ_in_the_worker_alone() -> None:
    options = OPTIONS._replace(concurrency=(1, 32), with_builtin=True, block_size=8)
    plain, builtin, ours = (
        comparison.make_server(mode, options) for mode in comparison.choose_modes(options)
    )
    assert "--speculative-algorithm" not in plain.command
    for server in (plain, builtin, ours):
        text = " ".join(server.command)
        assert "--max-running-requests 32 --max-total-tokens 16384" in text
        # Only DFLASH would otherwise wait for several free slots at this load.
        assert "--min-free-slots-delay 1" in text
        assert "--device" not in text

    def flags(server: Server) -> list[str]:
        return [word for word in server.command if word != str(server.port)]

    assert flags(builtin) == flags(ours)
    assert builtin.env["DFLASH_SGLANG_WORKER"] == "builtin"
    assert "--speculative-dflash-block-size" in ours.command
    assert not ours.detached
    assert comparison.make_server(
        comparison.choose_modes(options)[2], options._replace(serve=True)
    ).detached


def test_on_a_gpu_servers_are_bfloat16_and_one_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # However much memory the host has: what they share is the GPU's.
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1e12))
    options = OPTIONS._replace(device=GPU, with_builtin=True, concurrency=(8,))
    modes = comparison.choose_modes(options)
    assert [mode.name for mode in modes] == ["plain", "builtin", "fixed", "dflash"]
    for mode in modes:
        server = comparison.make_server(mode, options)
        text = " ".join(server.command)
        assert "--dtype bfloat16" in text
        assert "float32" not in text
        assert "--disable-overlap-schedule" not in text
        assert "--max-mamba-cache-size" not in text
    assert comparison.group(modes, GPU)[0] == [[mode] for mode in modes]
    assert comparison.group(modes, CPU)[0] == [modes]
    assert str(comparison.FIXED_WIDTH) in comparison.make_server(modes[2], options).command
    assert read_settings(str(comparison.FIXED_WIDTH), lora=False).width == "fixed"


def test_on_a_gpu_the_states_of_the_hybrid_pair_do_not_take_its_memory() -> None:
    options = OPTIONS._replace(model="hybrid", device=GPU, concurrency=(8,))
    for mode in comparison.choose_modes(options):
        text = " ".join(comparison.make_server(mode, options).command)
        assert "--max-mamba-cache-size 48" in text


@pytest.mark.parametrize("arguments", [[], ["--gpu"]])
def test_a_gpu_serves_only_if_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    fake_gpu(monkeypatch)
    seen: list[dict[str, str]] = []

    def run(command: demo.Command) -> int:
        for mode in comparison.choose_modes(command.options):
            seen.append(comparison.make_server(mode, command.options).env)
        return 0

    monkeypatch.setattr(demo, "run", run)
    monkeypatch.setattr("sys.argv", ["launch/demo", *arguments])
    assert demo.main() == 0
    assert {env.get("CUDA_VISIBLE_DEVICES") for env in seen} == {None if arguments else ""}


def test_gpu_without_a_gpu_is_refused_before_a_server_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(demo, "run", lambda _: pytest.fail("it ran"))
    monkeypatch.setattr("sys.argv", ["launch/demo", "--gpu"])
    assert demo.main() == 2
    assert "leave --gpu out" in capsys.readouterr().err


def gpu_passes(tau: float, ids: tuple[int, ...] = (1, 2)) -> tuple[list[Pass], list[str]]:
    """Plain decoding and a fixed width that reaches a share `tau` of each family's float32 tau."""
    expected = on_gpu.expected_tau("moe", 16)
    answers, plain = [], []
    for value in expected.values():
        tokens = 1000
        meta = {"completion_tokens": tokens + 1, "spec_verify_ct": round(tokens / (tau * value))}
        answers.append(Answer("", ids, meta))
        plain.append(Answer("", (1, 2), {"completion_tokens": 2}))
    passes = [Pass(PLAIN, 1, Load(tuple(plain), 1.0)), Pass("fixed", 1, Load(tuple(answers), 1.0))]
    return passes, list(expected)


def test_on_a_gpu_equal_answers_are_reported_and_not_required(
    capsys: pytest.CaptureFixture[str],
) -> None:
    passes, families = gpu_passes(0.95, ids=(1, 3))
    assert on_gpu.judge(passes, OPTIONS._replace(device=GPU), families)
    err = capsys.readouterr().err
    assert f"fixed at concurrency 1: 0 of {len(families)} answers equal plain" in err
    assert "that is 0.95 of it" in err


def test_on_a_gpu_a_low_tau_fails_though_all_answers_are_equal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    passes, families = gpu_passes(0.7)
    assert not on_gpu.judge(passes, OPTIONS._replace(device=GPU), families)
    assert "tau is too low" in capsys.readouterr().err


def test_on_a_gpu_the_exit_status_is_that_of_tau(
    monkeypatch: pytest.MonkeyPatch, server: FakeServer
) -> None:
    for good in (True, False):
        monkeypatch.setattr("launch.on_gpu.judge", lambda *_, good=good: good)
        arguments = ["--gpu", "--rounds", "1"]
        assert run_demo(monkeypatch, server, arguments, lambda _: [1, 9]) == int(not good)


def test_prompts_cover_the_families_in_turn() -> None:
    families = [name for name, prompts in zoo.prompts("moe").items() if prompts]
    chosen = comparison.choose_prompts("moe", 2 * len(families))
    assert [prompt.family for prompt in chosen] == families * 2
    everything = sum(map(len, zoo.prompts("moe").values()))
    assert len(comparison.choose_prompts("moe", everything)) == everything
    assert len(set(comparison.choose_prompts("moe", everything))) == everything


@pytest.mark.parametrize("spelling", [["1", "4"], ["1,4"], ["1", "4", "1"]])
def test_spellings_of_concurrency(spelling: list[str]) -> None:
    assert demo.parse(["--concurrency", *spelling]).options.concurrency == (1, 4)


def test_block_size_defaults_to_the_trained_one() -> None:
    config = json.loads((zoo.path("moe").drafter / "config.json").read_text())
    assert demo.parse([]).options.block_size == config["block_size"]
    assert demo.parse(["--block-size", "4"]).options.block_size == 4


@pytest.mark.parametrize("name", ["moe", "hybrid"])
def test_a_pair_is_chosen_by_name(name: str) -> None:
    options = demo.parse(["--model", name]).options
    for mode in comparison.choose_modes(options):
        server = comparison.make_server(mode, options)
        assert str(zoo.path(name).verifier) in server.command
        assert (str(zoo.path(name).drafter) in server.command) == (mode.name != PLAIN)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--block-size", "17"], "--block-size 17: the drafter takes 2 to 16"),
        (["--block-size", "1"], "--block-size 1: the drafter takes 2 to 16"),
        (["--prompts", "4"], "at least the highest concurrency (8)"),
        (["--prompts", "1000000"], "at most the"),
        (["--concurrency", "0"], "must be at least 1"),
        (["--rounds", "0"], "must be at least 1"),
        (["--json", "no/such/folder/x.json"], "there is no folder"),
        (["--model", "nothing"], "invalid choice"),
    ],
)
def test_refuses_before_a_server_is_started(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        demo.parse(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_differences_are_reported_once_per_row(capsys: pytest.CaptureFixture[str]) -> None:
    same, other = (
        Load((Answer("", ids, {"completion_tokens": 2}),), 1.0) for ids in ((1, 2), (1, 3))
    )
    passes = [Pass("plain", 1, same), Pass("dflash", 1, other), Pass("dflash", 1, other)]
    demo.report_differences(passes, same, ["question"])
    assert capsys.readouterr().err.count("differs from plain at token 1") == 1
