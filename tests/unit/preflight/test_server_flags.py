"""Refusals at start: each flag by its own sentence, before anything is resolved or loaded."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_sglang.errors import ConfigError, PairError, UnsupportedFlagError
from dflash_sglang.preflight import server_flags as start
from dflash_sglang.preflight.refused_flags import REFUSED, WITHOUT_EFFECT, Flag
from tests.support.pair_builder import small_pair
from tests.support.server_flags import DRAFTER, VERIFIER, server_flags

ROOT = Path(__file__).parents[3]


def _bad(flag: Flag) -> object:
    """A value the flag does not have by default."""
    if flag.neutral is None or isinstance(flag.neutral, str):
        return "decode"
    if isinstance(flag.neutral, bool):
        return True
    return 0.9 if isinstance(flag.neutral, float) else 2


def test_neutral_values_are_sglangs_defaults() -> None:
    """A default that changed would refuse every server."""
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(model_path="dummy")
    for flag in REFUSED + WITHOUT_EFFECT:
        assert getattr(args, flag.field) == flag.neutral, flag.flag


def test_the_default_start_passes() -> None:
    start.check_start(server_flags(), {})


@pytest.mark.parametrize(
    ("content", "message"),
    [('{"max_width": 12}', "block size 8"), ('{"wide": 1}', "unknown key 'wide'")],
    ids=["wider than the block", "unknown key"],
)
def test_settings_that_cannot_be_are_refused(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text(content)
    given = server_flags(speculative_adaptive_config=str(file), speculative_dflash_block_size=8)
    with pytest.raises(ConfigError, match=message):
        start.check_start(given, {})


@pytest.mark.parametrize("turned_on", [{"enable_lora": True}, {"lora_paths": ["folder"]}], ids=str)
def test_several_widths_with_lora_are_refused(turned_on: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text('{"width": "adaptive"}')
    given = server_flags(speculative_adaptive_config=str(file), **turned_on)
    with pytest.raises(ConfigError, match="with LoRA every step has the width of the block"):
        start.check_start(given, {})
    start.check_start(server_flags(**turned_on), {})


@pytest.mark.parametrize("size", [2, 8, 16])
def test_every_block_up_to_the_trained_one_passes(size: int) -> None:
    start.check_start(server_flags(speculative_dflash_block_size=size), {})
    start.check_start(server_flags(speculative_num_draft_tokens=size), {})


@pytest.mark.parametrize("flag", REFUSED, ids=lambda flag: flag.field)
def test_refused_flags_say_flag_value_and_way_out(flag: Flag) -> None:
    bad = _bad(flag)
    with pytest.raises(UnsupportedFlagError) as refusal:
        start.check_start(server_flags(**{flag.field: bad}), {})
    text = str(refusal.value)
    assert flag.flag in text
    assert f"given: {bad}" in text
    assert flag.instead in text
    assert "\n" not in text


@pytest.mark.parametrize("flag", REFUSED, ids=lambda flag: flag.field)
def test_the_builtin_worker_is_refused_only_what_it_cannot_serve(flag: Flag) -> None:
    given = server_flags(**{flag.field: _bad(flag)})
    environment = {"DFLASH_SGLANG_WORKER": "builtin"}
    if flag.any_worker:
        with pytest.raises(UnsupportedFlagError):
            start.check_start(given, environment)
    else:
        start.check_start(given, environment)


def test_other_heads_go_to_sglang_with_its_own_limits(tmp_path: Path) -> None:
    pair = small_pair()
    pair.dflash.update(selector_rank=2, selector_top_k=2)
    verifier, draft = map(str, pair.write(tmp_path))
    given = {"model_path": verifier, "speculative_draft_model_path": draft}
    start.check_start(server_flags(**given, attn_dp_size=2), {})
    with pytest.raises(UnsupportedFlagError, match="--pp-size"):
        start.check_start(server_flags(**given, pp_size=2), {})


@pytest.mark.parametrize("flag", WITHOUT_EFFECT, ids=lambda flag: flag.field)
def test_flags_without_effect_are_named(flag: Flag, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger=start.__name__):
        start.check_start(server_flags(**{flag.field: _bad(flag)}), {})
    assert any(flag.flag in message and "no effect" in message for message in caplog.messages)


@pytest.mark.parametrize("algorithm", [None, "EAGLE3", "NGRAM", "NEXTN"])
def test_other_algorithms_are_left_alone(algorithm: str | None) -> None:
    start.check_start(
        server_flags(speculative_algorithm=algorithm, pp_size=4, model_path="/no/such"), {}
    )


def test_lower_case_is_the_same_algorithm() -> None:
    with pytest.raises(UnsupportedFlagError, match="--pp-size"):
        start.check_start(server_flags(speculative_algorithm="dflash", pp_size=2), {})


@pytest.mark.parametrize("path", [None, ""])
def test_no_drafter(path: str | None) -> None:
    with pytest.raises(UnsupportedFlagError, match="--speculative-draft-model-path") as refusal:
        start.check_start(server_flags(speculative_draft_model_path=path), {})
    assert repr(path) in str(refusal.value)


def test_all_flags_are_named_at_once() -> None:
    with pytest.raises(UnsupportedFlagError) as refusal:
        start.check_start(server_flags(pp_size=2, speculative_draft_model_path=None), {})
    assert "[1]" in str(refusal.value)
    assert "--pp-size" in str(refusal.value)


def test_two_block_sizes() -> None:
    given = server_flags(speculative_dflash_block_size=8, speculative_num_draft_tokens=16)
    with pytest.raises(UnsupportedFlagError, match=r"given: 8.*given: 16"):
        start.check_start(given, {})


def test_a_window_narrower_than_the_block() -> None:
    given = server_flags(speculative_dflash_block_size=16, speculative_draft_window_size=8)
    with pytest.raises(UnsupportedFlagError, match="--speculative-draft-window-size"):
        start.check_start(given, {})


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_overrides_that_are_no_object(text: str) -> None:
    with pytest.raises(UnsupportedFlagError, match="--json-model-override-args"):
        start.check_start(server_flags(json_model_override_args=text), {})


@pytest.mark.parametrize("size", [1, 0, -1, 17, 64])
def test_blocks_that_were_not_trained(size: int) -> None:
    with pytest.raises(PairError, match=f"--speculative-dflash-block-size {size}"):
        start.check_start(server_flags(speculative_dflash_block_size=size), {})


@pytest.mark.parametrize("field", ["model_path", "speculative_draft_model_path"])
def test_a_missing_folder(field: str) -> None:
    with pytest.raises(PairError, match=r"does not exist .*given: --[a-z-]*model-path /no/such"):
        start.check_start(server_flags(**{field: "/no/such"}), {})


def test_warnings_of_the_pair_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pair = small_pair()
    pair.draft["max_position_embeddings"] = 1024
    verifier, draft = map(str, pair.write(tmp_path))
    with caplog.at_level(logging.WARNING, logger=start.__name__):
        start.check_start(server_flags(model_path=verifier, speculative_draft_model_path=draft), {})
    assert any("shorter context" in message for message in caplog.messages)


def test_hub_names_are_left_for_the_scheduler() -> None:
    start.check_start(
        server_flags(model_path="no-such-owner/verifier", speculative_draft_model_path=DRAFTER), {}
    )


@pytest.fixture
def resolution_hooks() -> Iterator[dict[str, list[Any]]]:
    """SGLang's registry, restored afterwards."""
    from sglang.srt.arg_groups import resolution_hooks

    before = {name: list(hooks) for name, hooks in resolution_hooks._HOOKS.items()}
    yield resolution_hooks._HOOKS
    resolution_hooks._HOOKS.clear()
    resolution_hooks._HOOKS.update(before)


def test_it_runs_in_sglangs_own_resolution(resolution_hooks: dict[str, list[Any]]) -> None:
    """Before the model path is touched: this one does not exist, and SGLang would look for it."""
    from sglang.srt.server_args import ServerArgs

    start.install()
    args = ServerArgs(
        model_path=VERIFIER,
        speculative_algorithm="DFLASH",
        speculative_draft_model_path=DRAFTER,
        pp_size=2,
        device="cpu",
    )
    with pytest.raises(UnsupportedFlagError, match="--pp-size"):
        args.resolve_once()
    other = ServerArgs(
        model_path="/no/such",
        speculative_algorithm="DFLASH",
        speculative_draft_model_path=DRAFTER,
        device="cpu",
    )
    with pytest.raises(PairError, match="/no/such"):
        other.resolve_once()


@pytest.mark.slow
def test_the_launcher_stops_with_one_line() -> None:
    """No traceback, no second process; the line names flag, value and way out."""
    program = (
        "import runpy; from dflash_sglang.preflight import server_flags; server_flags.install(); "
        "runpy.run_module('sglang.launch_server', run_name='__main__', alter_sys=True)"
    )
    arguments = ["--model-path", VERIFIER, "--speculative-algorithm", "DFLASH"]
    arguments += ["--host", "127.0.0.1", "--port", "1"]
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "SGLANG_PLUGINS": "none"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("dflash_sglang: UnsupportedFlagError: ")
    assert "--speculative-draft-model-path (given: None)" in last


def test_a_library_caller_gets_the_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """SystemExit would take a notebook or a service down with it."""
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys, "argv", ["notebook"])
    with pytest.raises(UnsupportedFlagError):
        start.check_before(_args(pp_size=2), lambda args: None)
    monkeypatch.setattr(sys, "argv", ["/usr/bin/sglang", "serve"])
    with pytest.raises(SystemExit, match="--pp-size"):
        start.check_before(_args(pp_size=2), lambda args: None)


def test_the_wrapped_step_runs_after_a_good_check() -> None:
    seen: list[object] = []
    args = _args()
    start.check_before(args, seen.append)
    assert seen == [args]


def _args(**changed: Any) -> Any:
    from sglang.srt.server_args import ServerArgs

    return ServerArgs(
        model_path=VERIFIER,
        speculative_algorithm="DFLASH",
        speculative_draft_model_path=DRAFTER,
        **changed,
    )
