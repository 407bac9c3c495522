"""The contract with SGLang: the table is complete, holds for the pinned wheel, and can fail."""

import ast
from pathlib import Path

import pytest

from dflash_sglang.preflight import sglang_names as contract
from dflash_sglang.preflight.sglang_names import CPU_NAMES, HOST_NAMES, verify_contract
from dflash_sglang.preflight.source import Name

PACKAGE = Path(contract.__file__).parents[1]
REGISTRY = "sglang.srt.plugins.hook_registry:HookRegistry"


def sglang_imports(folder: str) -> set[str]:
    """`module:name` of everything a folder imports from SGLang, also inside functions."""
    found = set()
    for file in (PACKAGE / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang."):
                found |= {f"{node.module}:{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize(("folder", "names"), [("host", HOST_NAMES), ("cpu", CPU_NAMES)])
def test_every_import_from_sglang_is_in_the_table(folder: str, names: tuple[Name, ...]) -> None:
    # A class is listed itself or through the members we use of it; a module through its names.
    listed = {name.path for name in (*HOST_NAMES, *names)}
    missing = {
        path
        for path in sglang_imports(folder)
        if not any(
            entry == path
            or entry.startswith(f"{path}.")
            or entry.startswith(f"{path.replace(':', '.')}:")
            for entry in listed
        )
    }
    assert not missing


def test_the_installed_wheel_fulfils_the_contract() -> None:
    assert verify_contract((*HOST_NAMES, *CPU_NAMES)) == []


@pytest.mark.parametrize(
    ("path", "params", "found"),
    [
        ("sglang.srt.plugins.no_such_module:f", None, "module not found"),
        (f"{REGISTRY}.no_such_method", (), "name not found"),
        (f"{REGISTRY}.register", ("hook", "target"), "has parameters (target, hook, hook_type"),
        (f"{REGISTRY}._hooks", (), "not a function"),
    ],
    ids=["module", "name", "reordered parameters", "not callable"],
)
def test_a_changed_host_is_noticed(path: str, params: tuple[str, ...] | None, found: str) -> None:
    mismatches = verify_contract((Name(path, params, "this test"),))
    assert len(mismatches) == 1
    assert found in str(mismatches[0])
    assert "this test" in str(mismatches[0])


def test_parameters_added_at_the_end_are_fine() -> None:
    assert verify_contract((Name(f"{REGISTRY}.register", ("target",), "this test"),)) == []


def test_another_release_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "installed_version", lambda: "0.5.24")
    (mismatch,) = verify_contract(())
    assert "0.5.24" in str(mismatch)
    assert contract.SGLANG_VERSION in str(mismatch)


def test_without_sglang_the_verdict_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "installed_version", lambda: None)
    (mismatch,) = verify_contract()
    assert "not installed" in str(mismatch)
