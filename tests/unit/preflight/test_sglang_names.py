"""What we rely on in SGLang: complete, as the pinned wheel has it, and able to fail."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
from pathlib import Path

import pytest

from dflash_sglang import check, hooks
from dflash_sglang.errors import ContractError
from dflash_sglang.preflight import own_uses, sglang_names
from dflash_sglang.preflight.own_uses import PACKAGE, imported_names
from dflash_sglang.preflight.sglang_names import check_installed, listed_names, relied_on
from dflash_sglang.preflight.sglang_table import CPU, WORKER
from dflash_sglang.preflight.source import FLAGS, Name, Source
from dflash_sglang.preflight.version import SGLANG_VERSION

REGISTRY = "sglang.srt.plugins.hook_registry:HookRegistry"
LISTED = {name.path: name for name in (*listed_names(WORKER), *listed_names(CPU))}


def installed() -> Source:
    source = Source.installed()
    assert source is not None
    return source


def test_the_pinned_wheel_has_everything() -> None:
    assert check_installed(relied_on(with_cpu=True)) == []


# ---- the table is complete -----------------------------------------------------------------------


def test_every_hook_is_listed() -> None:
    listed = {path.replace(":", ".") for path in LISTED}
    assert {hook.target for hook in hooks.PROCESS_HOOKS + hooks.WORKER_HOOKS} <= listed


def subclasses() -> list[type]:
    """Our classes that derive from one of SGLang's."""
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        names = re.findall(r"(?m)^class (\w+)\(", file.read_text(encoding="utf-8"))
        if names and file.relative_to(PACKAGE).parts[0] in ("step", "cpu"):
            module = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
            classes = [getattr(importlib.import_module(module), name) for name in names]
            found += [c for c in classes if any(_is_sglangs(base) for base in c.__mro__)]
    return found


def _is_sglangs(owner: type) -> bool:
    return owner.__module__.startswith("sglang.")


def test_every_overridden_method_is_listed() -> None:
    """Under some class that it is inherited from: SGLang calls it by this name."""
    missing, seen = [], 0
    for ours in subclasses():
        for name, member in vars(ours).items():
            owners = [base for base in ours.__mro__ if _is_sglangs(base) and name in vars(base)]
            if not owners or not inspect.isfunction(member) or name == "__init__":
                continue
            seen += 1
            paths = {f"{owner.__module__}:{owner.__qualname__}.{name}" for owner in owners}
            if not paths & set(LISTED):
                missing.append(f"{ours.__name__}.{name} overrides {paths}")
    assert missing == []
    assert seen > 30


def test_calls_by_position_have_their_parameters_listed() -> None:
    """An import statement does not show an order."""
    for file in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        bound = {
            alias.asname or alias.name: f"{node.module}:{alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang.")
            for alias in node.names
        }
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and len(node.args) > 1
                and isinstance(node.func, ast.Name)
            ):
                path = bound.get(node.func.id)
                assert path is None or LISTED[path].params, f"{file}:{node.lineno} {path}"


@pytest.mark.parametrize(
    ("path", "keywords"),
    [
        ("sglang.srt.managers.schedule_batch:ScheduleBatch", ()),
        ("sglang.srt.model_executor.forward_batch_info:CaptureHiddenMode.FULL", ()),
        ("sglang.srt.speculative.draft_worker_common:build_draft_tp_worker", ("gpu_id",)),
        ("sglang.srt.arg_groups:choices.ATTENTION_BACKEND_CHOICES", ()),
        (f"{FLAGS}:speculative_adaptive_config", ()),
    ],
    ids=["import", "class attribute", "keyword", "module attribute", "flag"],
)
def test_our_own_sources_are_read(path: str, keywords: tuple[str, ...]) -> None:
    name = next(name for name in imported_names(with_cpu=True) if name.path == path)
    assert name.keywords.issuperset(keywords)
    assert (PACKAGE / name.why).is_file()


def test_what_only_the_cpu_platform_uses_is_left_out_elsewhere() -> None:
    both, worker = (imported_names(with_cpu=with_cpu) for with_cpu in (True, False))
    platform = "sglang.srt.platforms.interface:SRTPlatform"
    assert platform in {name.path for name in both} - {name.path for name in worker}


def test_a_function_of_ours_that_is_gone_is_named() -> None:
    with pytest.raises(LookupError, match="CpuPlatform of dflash_sglang has no function gone"):
        own_uses.parameters_of("CpuPlatform", "gone")


# ---- it can fail ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "found"),
    [
        (Name("sglang.srt.plugins.no_such_module:f", "test"), "module not found"),
        (Name(f"{REGISTRY}.no_such_method", "test"), "name not found"),
        (Name(f"{REGISTRY}.register", "test", ("hook", "target")), "has parameters (target, hook"),
        (Name(f"{REGISTRY}.register", "test", keywords=frozenset({"no_such"})), "has parameters"),
        (Name(f"{REGISTRY}._hooks", "test", ("a",)), "not a function"),
        (Name(f"{FLAGS}:no_such_flag", "test"), "not a server flag"),
    ],
    ids=["module", "name", "reordered parameters", "keyword", "not callable", "flag"],
)
def test_a_change_is_noticed(name: Name, found: str) -> None:
    (mismatch,) = check_installed([name])
    assert found in str(mismatch)
    assert "needed for test" in str(mismatch)


@pytest.mark.parametrize(
    ("params", "fits"),
    [
        (("target",), True),  # SGLang may add parameters at the end
        (("target", "hook_type", "**"), True),  # between those that a function of ours names
        (("hook_type", "target", "**"), False),
        (("hook",), False),
    ],
)
def test_parameters_that_were_added_are_fine(params: tuple[str, ...], fits: bool) -> None:
    assert (installed().problem(Name(f"{REGISTRY}.register", "test", params)) is None) is fits


def test_another_release_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_names, "installed_version", lambda: "0.5.24")
    (mismatch,) = check_installed([])
    assert "0.5.24" in str(mismatch)
    assert SGLANG_VERSION in str(mismatch)


def test_without_sglang_nothing_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_names, "installed_version", lambda: None)
    (mismatch,) = check_installed([])
    assert "not installed" in str(mismatch)


# ---- another release -----------------------------------------------------------------------------

# What a new release might do: file, text there, text instead, and what is to be reported.
CHANGES = {
    "a signature": (
        "srt/plugins/hook_registry.py",
        "        target: str,\n        hook: Callable,\n",
        "        hook: Callable,\n        target: str,\n",
        ("HookRegistry.register(target, hook, hook_type, source, ...): has parameters (hook",),
    ),
    "a method": (
        "srt/speculative/base_spec_worker.py",
        "def note_request_finished(",
        "def note_request_ended(",
        ("BaseSpecWorker.note_request_finished(rid, natural_stop, ...): name not found",),
    ),
    "an import": (
        "srt/layers/logprob_processor.py",
        "def compute_spec_logprobs(",
        "def compute_speculative_logprobs(",
        # Listed with the order of its parameters, and imported by the worker.
        (
            "logprob_processor:compute_spec_logprobs(batch, logits_output, predict, accept_index, "
            "chain_stride, ...): name not found",
            "logprob_processor:compute_spec_logprobs: name not found; needed for step/worker.py",
        ),
    ),
    "a keyword": (
        "srt/speculative/draft_worker_common.py",
        "    target_model_config: ModelConfig,\n",
        "    verifier_model_config: ModelConfig,\n",
        ("draft_worker_common:build_draft_tp_worker: has parameters",),
    ),
    "a flag": (
        "srt/arg_groups/fields/spec.py",
        "    speculative_dflash_block_size: ",
        "    speculative_block_size: ",
        ("fields:speculative_dflash_block_size: not a server flag",),
    ),
    "a module": ("srt/speculative/spec_tp_sync.py", None, None, ("spec_tp_sync:SpecTpSync",)),
}


@pytest.fixture
def unpacked(tmp_path: Path) -> Path:
    """The parts of the installed wheel that we rely on, as a wheel unpacks."""
    folder = tmp_path / "wheel"
    origin = Path(inspect.getfile(importlib.import_module("sglang"))).parent
    for name in ("__init__.py", *(f"{part}/" for part in ("srt", "kernels"))):
        for file in (origin / name).rglob("*.py") if name.endswith("/") else [origin / name]:
            copy = folder / "sglang" / file.relative_to(origin)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.symlink_to(file)
    return folder


def test_an_equal_release_has_everything(unpacked: Path) -> None:
    assert Source(unpacked).mismatches(relied_on(with_cpu=True)) == []


def test_every_change_of_a_release_is_reported(
    unpacked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of them in one release: each is found, and nothing else is."""
    for where, old, new, _ in CHANGES.values():
        file = unpacked / "sglang" / where
        text = file.read_text(encoding="utf-8")
        file.unlink()  # a link into the installed wheel
        if old is not None and new is not None:
            assert old in text, "the pinned wheel looks different: adapt this test"
            file.write_text(text.replace(old, new, 1), encoding="utf-8")
    assert check.main(["--against", str(unpacked), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["contract"]["mismatches"]
    expected = [sentence for *_, reported in CHANGES.values() for sentence in reported]
    for sentence in expected:
        assert any(sentence in line for line in found), sentence
    unexpected = [line for line in found if not any(sentence in line for sentence in expected)]
    assert unexpected == []


def test_a_folder_without_sglang_is_refused(tmp_path: Path) -> None:
    (tmp_path / "srt").mkdir()  # the package itself, one level too deep
    with pytest.raises(ContractError, match=r"holds no sglang/__init__\.py"):
        Source(tmp_path)
