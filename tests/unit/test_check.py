"""`python -m dflash_sglang.check`, as a command."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_sglang import check, zoo
from dflash_sglang.preflight.draft_flags import DRAFT_FLAGS
from dflash_sglang.preflight.pair import check_pair
from dflash_sglang.preflight.sglang_names import relied_on
from dflash_sglang.preflight.source import Mismatch, Name
from tests.support.pair_builder import PairFiles, small_pair
from tests.support.public_pairs import qwen36_35b_a3b

ROOT = Path(__file__).parents[2]
SITE = Path(str(importlib.metadata.distribution("sglang").locate_file("")))
PAIR = [
    "--model-path",
    str(zoo.path("moe").verifier),
    "--speculative-draft-model-path",
    str(zoo.path("moe").drafter),
]
WITHOUT_SWITCHES = {
    key: value
    for key, value in os.environ.items()
    if not key.startswith(("SGLANG_", "DFLASH_SGLANG_"))
}


def _run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-m", "dflash_sglang.check", *arguments],
        env=WITHOUT_SWITCHES | {"PYTHONPATH": os.pathsep.join(paths)} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _json(*arguments: str, **environment: str) -> tuple[int, dict[str, Any]]:
    done = _run("--json", *arguments, **environment)
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


class _EntryPoints:
    names = frozenset({"dflash"})


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin's entry point is there, the wheel is the pinned one, and no accelerator is."""
    real = importlib.metadata.entry_points

    def entry_points(*, group: str) -> Any:  # torch looks up its own when it is imported
        return _EntryPoints if group == "sglang.srt.plugins" else real(group=group)

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    monkeypatch.setattr(check, "check_installed", lambda names: [])
    monkeypatch.setattr(check, "_has_accelerator_device", lambda: False)
    for name in set(os.environ) - set(WITHOUT_SWITCHES):
        monkeypatch.delenv(name)


Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(installed: None, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command in this process, with the installation stood in for."""

    def run(*arguments: str) -> tuple[int, str]:
        code = check.main(arguments)
        return code, capsys.readouterr().out

    return run


def _installed() -> bool:
    group = importlib.metadata.entry_points(group="sglang.srt.plugins")
    return "dflash" in group.names


def test_json_of_a_good_pair() -> None:
    code, verdict = _json(*PAIR)
    assert set(verdict) == {
        "schema",
        "ok",
        "dflash_sglang",
        "python",
        "sglang",
        "contract",
        "plugin",
        "platform",
        "worker",
        "pair",
        "flags",
    }
    assert verdict["flags"] == []
    assert verdict["schema"] == 1
    assert verdict["sglang"] == {"installed": "0.5.23", "supported": "0.5.23"}
    assert verdict["contract"]["mismatches"] == []
    assert verdict["contract"]["checked"] >= len(relied_on(with_cpu=False))
    assert verdict["pair"]["ok"] is True
    assert verdict["pair"]["layout"] == "plain"
    assert verdict["pair"]["findings"] == []
    assert code == (0 if verdict["ok"] else 1)
    assert verdict["ok"] is _installed()


def test_json_and_exit_code_of_a_bad_pair(command: Command) -> None:
    code, text = command("--json", *PAIR, "--speculative-dflash-block-size", "32")
    verdict = json.loads(text)
    assert code == 1
    assert verdict["ok"] is False
    assert [finding["code"] for finding in verdict["pair"]["findings"]] == ["run_block_large"]


def test_text_has_given_and_do(command: Command) -> None:
    code, text = command(*PAIR, "--speculative-dflash-block-size", "32")
    assert code == 1
    assert "given: --speculative-dflash-block-size 32, trained 16" in text
    assert "do:    Ask for 2 to 16" in text
    assert text.endswith("NOT OK\n")


def test_without_a_pair_only_the_installation_is_judged(command: Command) -> None:
    _, text = command("--json")
    assert json.loads(text)["pair"] is None


def test_half_a_pair_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        check.main(PAIR[:2])
    assert "go together" in capsys.readouterr().err


def test_neither_sglang_nor_transformers_is_imported() -> None:
    """The command must answer in a second or two, also on a machine with a broken install."""
    program = (
        "import sys; from dflash_sglang import check; check.main(sys.argv[1:]); "
        "print([m for m in ('sglang', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *PAIR],
        env=WITHOUT_SWITCHES | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_against_the_pinned_release(command: Command) -> None:
    code, text = command("--json", "--against", str(SITE))
    found = json.loads(text)
    assert code == 0
    assert (found["schema"], found["against"]) == (1, str(SITE))
    checked = len(relied_on(with_cpu=True))
    assert found["contract"] == {"ok": True, "checked": checked, "mismatches": []}


def test_against_another_release(command: Command, tmp_path: Path) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    code, text = command("--json", "--against", str(tmp_path))
    contract = json.loads(text)["contract"]
    assert code == 1
    assert contract["ok"] is False
    # Every mismatch, not only the first: nothing that we rely on is in an empty package.
    assert len(contract["mismatches"]) == contract["checked"]
    code, text = command("--against", str(tmp_path))
    assert code == 1
    assert "module not found; needed for hook" in text
    assert text.endswith("NOT OK\n")


def test_against_a_folder_without_sglang(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.main(["--against", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "holds no sglang/__init__.py" in printed.err


# ---- the reasoning, with the installation stood in for -------------------------------------------


@pytest.mark.usefixtures("installed")
def test_ours_serves_on_a_bare_machine() -> None:
    verdict = check.examine({}, None)
    assert verdict.ok
    assert (verdict.platform.name, verdict.worker.name) == ("dflash_cpu", "dflash_sglang")
    assert verdict.contract.checked == len(relied_on(with_cpu=True))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("environment", "worker", "reason"),
    [
        ({"DFLASH_SGLANG_WORKER": "builtin"}, "sglang", "DFLASH_SGLANG_WORKER=builtin"),
        ({"SGLANG_PLUGINS": "other"}, None, "SGLANG_PLUGINS=other"),
        ({"SGLANG_PLUGINS": "other, dflash"}, "dflash_sglang", "plain"),
        ({"SGLANG_USE_CPU_ENGINE": "1"}, None, "SGLANG_USE_CPU_ENGINE=1"),
        ({"SGLANG_PLATFORM": "other"}, None, "SGLANG_PLATFORM=other"),
        ({"SGLANG_PLATFORM": "dflash_cpu"}, "dflash_sglang", "plain"),
    ],
    ids=str,
)
def test_switches(environment: dict[str, str], worker: str | None, reason: str) -> None:
    verdict = check.examine(environment, None)
    assert verdict.worker.name == worker
    assert reason in verdict.worker.reason
    assert verdict.ok == (worker is not None)


@pytest.mark.usefixtures("installed")
def test_an_accelerator_keeps_the_cpu_platform_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_has_accelerator_device", lambda: True)
    monkeypatch.setattr("dflash_sglang.cpu.activation.find_accelerator", lambda: "cuda")
    verdict = check.examine({}, None)
    assert (verdict.platform.name, verdict.worker.name) == ("cuda", "dflash_sglang")
    assert verdict.contract.checked == len(relied_on(with_cpu=False))


@pytest.mark.usefixtures("installed")
def test_a_broken_contract_leaves_sglang_in_charge(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Mismatch(Name("sglang.srt.gone", "hooks"), "module not found")
    monkeypatch.setattr(check, "check_installed", lambda names: [wrong])
    verdict = check.examine({}, None)
    assert verdict.worker.name is None  # SGLang alone does not serve DFLASH on a CPU
    assert "module not found" in check.render(verdict)
    monkeypatch.setattr(check, "_has_accelerator_device", lambda: True)
    monkeypatch.setattr("dflash_sglang.cpu.activation.find_accelerator", lambda: "cuda")
    assert check.examine({}, None).worker.name == "sglang"


@pytest.mark.usefixtures("installed")
def test_the_drafter_decides_the_worker(tmp_path: Path) -> None:
    pair = small_pair()
    pair.dflash.update(selector_rank=2, selector_top_k=2)
    verdict = check.examine({}, check_pair(*pair.write(tmp_path / "dflash2")))
    assert (verdict.worker.name, verdict.ok) == ("sglang", True)
    assert "dflash2" in verdict.worker.reason
    pair = small_pair()
    pair.dflash["sample_from_anchor"] = True
    verdict = check.examine({}, check_pair(*pair.write(tmp_path / "anchor")))
    assert (verdict.worker.name, verdict.ok) == (None, False)


@pytest.mark.usefixtures("installed")
def test_a_bad_setting_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DFLASH_SGLANG_WORKER", "fast")
    assert check.main([]) == 1
    assert capsys.readouterr().err.startswith("DFLASH_SGLANG_WORKER is 'fast'")


# ---- the pair this package is made for -----------------------------------------------------------


def _sliding(pair: PairFiles, **changed: Any) -> None:
    """The drafter with windows in all layers but the last."""
    kinds = ["sliding_attention"] * 7 + ["full_attention"]
    pair.draft.update(layer_types=kinds, sliding_window=4096, use_sliding_window=True, **changed)


@pytest.mark.parametrize("sliding", [False, True], ids=["full attention", "sliding windows"])
def test_the_public_hybrid_pair_passes(tmp_path: Path, sliding: bool, command: Command) -> None:
    pair = qwen36_35b_a3b()
    if sliding:
        _sliding(pair)
    verifier, drafter = pair.write(tmp_path)
    _, text = command(
        "--json",
        *("--model-path", str(verifier), "--speculative-draft-model-path", str(drafter)),
    )
    verdict = json.loads(text)
    assert verdict["pair"]["ok"] is True
    assert [finding["severity"] for finding in verdict["pair"]["findings"]] == []


BROKEN: dict[str, tuple[Callable[[PairFiles], object], str, str]] = {
    "a tap on the last layer": (
        lambda pair: pair.dflash.update(target_layer_ids=[1, 10, 19, 28, 39]),
        "taps_last",
        "last one 39",
    ),
    "a tap past the stack": (
        lambda pair: pair.dflash.update(target_layer_ids=[1, 10, 19, 28, 40]),
        "taps_range",
        "40",
    ),
    "taps out of order": (
        lambda pair: pair.dflash.update(target_layer_ids=[10, 1, 19, 28, 37]),
        "taps_order",
        "[10, 1, 19, 28, 37]",
    ),
    "no taps": (lambda pair: pair.dflash.pop("target_layer_ids"), "taps_missing", ""),
    "another verifier's depth": (
        lambda pair: pair.draft.update(num_target_layers=48),
        "target_depth",
        "48",
    ),
    "no mask": (lambda pair: pair.dflash.pop("mask_token_id"), "mask_missing", ""),
    "a mask past the vocabulary": (
        lambda pair: pair.dflash.update(mask_token_id=248320),
        "mask_range",
        "248320",
    ),
    "a mask that ends the answer": (
        lambda pair: pair.dflash.update(mask_token_id=248046),
        "mask_stop",
        "248046",
    ),
    "no block size": (lambda pair: pair.draft.pop("block_size"), "block_size_missing", ""),
    "sliding layers without a window": (
        lambda pair: _sliding(pair) or pair.draft.update(sliding_window=None),
        "window_missing",
        "7 sliding layers",
    ),
    "a window that is switched off": (
        lambda pair: _sliding(pair) or pair.draft.update(use_sliding_window=False),
        "window_unused",
        "sliding_window 4096",
    ),
    "a window below the block": (
        lambda pair: _sliding(pair) or pair.draft.update(sliding_window=8),
        "window_small",
        "sliding_window 8",
    ),
    "a layer without its kind": (
        lambda pair: pair.draft.update(layer_types=["full_attention"] * 7),
        "layer_types",
        "num_hidden_layers 8",
    ),
    "another width": (
        lambda pair: pair.text.update(hidden_size=4096),
        "hidden_size",
        "4096",
    ),
}


@pytest.mark.parametrize("variant", BROKEN)
def test_a_broken_hybrid_pair_is_refused_with_the_reason(tmp_path: Path, variant: str) -> None:
    change, code, given = BROKEN[variant]
    pair = qwen36_35b_a3b()
    change(pair)
    report = check_pair(*pair.write(tmp_path))
    assert not report.ok
    finding = next(finding for finding in report.errors if finding.code == code)
    assert given in finding.given


# ---- the drafter's own flags -----------------------------------------------------------------

KV, FORMAT, QUANTIZATION = (flag for flag, _ in DRAFT_FLAGS.values())


def test_flags_of_the_drafter_are_answered(command: Command) -> None:
    code, text = command(KV, "fp8_e4m3", FORMAT, "dummy", QUANTIZATION, "unquant")
    assert code == 0
    assert f"flag       {KV} fp8_e4m3: served, half the memory" in text
    assert f"flag       {FORMAT} dummy: served, random weights" in text
    assert f"flag       {QUANTIZATION} unquant: served, weights as they are stored" in text


def test_a_refused_flag_fails_the_check(command: Command) -> None:
    code, text = command("--json", FORMAT, "gguf")
    assert code == 1
    (flag,) = json.loads(text)["flags"]
    assert (flag["flag"], flag["given"], flag["served"]) == (FORMAT, "gguf", False)
    assert "Give auto" in flag["reason"]


def test_the_drafters_files_are_not_looked_at_where_its_weights_are_random(
    command: Command, tmp_path: Path
) -> None:
    verifier, draft = small_pair().write(tmp_path)
    (draft / "model.safetensors").unlink()
    pair = ["--model-path", str(verifier), "--speculative-draft-model-path", str(draft)]
    assert command(*pair)[0] == 1
    assert command(*pair, FORMAT, "dummy")[0] == 0


def test_flags_are_not_judged_for_another_worker(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_SGLANG_WORKER", "builtin")
    code, text = command(FORMAT, "layered")
    assert (code, "flag " in text) == (0, False)
