"""`python -m dflash_sglang.check`: will our worker serve here, and does this pair fit?

Answers without starting a server. SGLang is not imported (its sources are parsed) and no weight is
read; torch is imported only where the machine may have an accelerator. With --against it compares
what this package relies on with another SGLang. docs/reference/check.md describes the JSON.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import dflash_sglang
from dflash_sglang.errors import ConfigError, ContractError
from dflash_sglang.preflight.draft_flags import DRAFT_FLAGS, DraftFlag, draft_flags
from dflash_sglang.preflight.pair import PairReport, ServedBy, check_pair
from dflash_sglang.preflight.serving import serving_worker
from dflash_sglang.preflight.sglang_names import check_installed, relied_on
from dflash_sglang.preflight.source import Mismatch, Source
from dflash_sglang.preflight.version import SGLANG_VERSION, installed_version

SCHEMA = 1
_PLUGIN_GROUP, _PLUGIN = "sglang.srt.plugins", "dflash"
_CPU = "dflash_cpu"
_NOTHING_GIVEN = MappingProxyType(dict.fromkeys(DRAFT_FLAGS))
# What the drafter takes from the verifier's flags, which this command does not ask for.
_VERIFIERS = {
    "load_format": "auto",
    "quantization": None,
    "_speculative_draft_quantization_explicitly_set": None,
}
_SWITCHES = frozenset({"SGLANG_USE_CPU_ENGINE", "SGLANG_PLATFORM"})
_DEV = Path("/dev")
# CUDA (native, WSL), ROCm, XPU, NPU, MUSA.
_DEVICES = ("nvidia*", "dxg", "kfd", "dri", "davinci*", "mthreads*")


@dataclass(frozen=True)
class Contract:
    """Whether an SGLang offers what we rely on."""

    ok: bool
    checked: int  # names looked up
    mismatches: tuple[str, ...]

    @staticmethod
    def of(checked: int, mismatches: Sequence[Mismatch]) -> Contract:
        """The outcome of looking names up."""
        return Contract(not mismatches, checked, tuple(str(found) for found in mismatches))


@dataclass(frozen=True)
class Answer:
    """One verdict with its reason."""

    name: str | None  # what was decided; None: nothing can
    reason: str


@dataclass(frozen=True)
class Verdict:
    """Everything that the command reports."""

    sglang: str | None  # installed version
    contract: Contract
    plugin: Answer  # "active" or None
    platform: Answer  # "dflash_cpu", an accelerator, or None
    worker: Answer  # a ServedBy, or None
    pair: PairReport | None
    flags: tuple[DraftFlag, ...]  # of the drafter, as far as they are given

    @property
    def ok(self) -> bool:
        """Whether DFLASH can be served so; the exit code."""
        fits = self.pair is None or self.pair.ok
        return self.worker.name is not None and fits and all(flag.served for flag in self.flags)

    def as_dict(self) -> dict[str, Any]:
        """The verdict as plain JSON types."""
        return {
            "schema": SCHEMA,
            "ok": self.ok,
            "dflash_sglang": dflash_sglang.__version__,
            "python": platform.python_version(),
            "sglang": {"installed": self.sglang, "supported": SGLANG_VERSION},
            "contract": asdict(self.contract),
            "plugin": asdict(self.plugin),
            "platform": asdict(self.platform),
            "worker": asdict(self.worker),
            "pair": None if self.pair is None else self.pair.as_dict(),
            "flags": [flag._asdict() for flag in self.flags],
        }


def examine(
    environment: Mapping[str, str],
    pair: PairReport | None,
    given: Mapping[str, str | None] = _NOTHING_GIVEN,
) -> Verdict:
    """Check this installation, the pair where one is given, and the drafter's own flags.

    Args:
        environment: the process environment.
        pair: outcome of the pair check.
        given: the drafter's own flags, by field.
    """
    found_platform = _platform(environment)
    names = relied_on(with_cpu=found_platform.name == _CPU)
    contract = Contract.of(len(names), check_installed(names))
    plugin = _plugin(environment, contract)
    worker = _worker(environment, plugin, found_platform, pair)
    flags: tuple[DraftFlag, ...] = ()
    if worker.name == ServedBy.OURS:
        device = "cpu" if found_platform.name == _CPU else found_platform.name
        flags = tuple(draft_flags(SimpleNamespace(device=device, **_VERIFIERS, **given)))
    return Verdict(
        sglang=installed_version(),
        contract=contract,
        plugin=plugin,
        platform=found_platform,
        worker=worker,
        pair=pair,
        flags=flags,
    )


def _platform(environment: Mapping[str, str]) -> Answer:
    if not _has_accelerator_device() and not _SWITCHES.intersection(environment):
        return Answer(_CPU, "no accelerator: the CPU platform of this package serves")
    # Late: it imports torch, which takes seconds.
    from dflash_sglang.cpu.activation import find_accelerator, inactive_reason

    accelerator = find_accelerator()
    reason = inactive_reason(environment, lambda: accelerator)
    if reason is None:
        return Answer(_CPU, "no accelerator: the CPU platform of this package serves")
    return Answer(accelerator, f"the CPU platform of this package stays inactive: {reason}")


def _has_accelerator_device() -> bool:
    """Whether torch could find an accelerator; without a device node it cannot."""
    return sys.platform != "linux" or any(any(_DEV.glob(kind)) for kind in _DEVICES)


def _plugin(environment: Mapping[str, str], contract: Contract) -> Answer:
    """Whether SGLang will run our plugin, by the rules of its `load_plugins`."""
    entry_points = importlib.metadata.entry_points(group=_PLUGIN_GROUP)
    if _PLUGIN not in entry_points.names:
        return Answer(None, "dflash_sglang is not installed: pip install it beside sglang")
    allowed = [name.strip() for name in environment.get("SGLANG_PLUGINS", "").split(",")]
    if any(allowed) and _PLUGIN not in allowed:
        return Answer(None, f"SGLANG_PLUGINS={environment['SGLANG_PLUGINS']} leaves {_PLUGIN} out")
    selected = environment.get("SGLANG_PLATFORM", "")
    if selected not in ("", _CPU):
        # SGLang then skips every plugin of a package that has a platform of another name.
        return Answer(None, f"SGLANG_PLATFORM={selected} makes SGLang skip this package")
    if not contract.ok:
        return Answer(None, f"the contract with SGLang does not hold: {contract.mismatches[0]}")
    return Answer("active", "installed, and the contract with SGLang holds")


def _worker(
    environment: Mapping[str, str], plugin: Answer, found: Answer, pair: PairReport | None
) -> Answer:
    if found.name is None:
        return Answer(None, f"nothing to serve DFLASH on: {found.reason}")
    if plugin.name is None:
        if found.name == _CPU:
            return Answer(None, f"DFLASH needs this package on a CPU: {plugin.reason}")
        return Answer(ServedBy.SGLANG, plugin.reason)
    serving = serving_worker(None if pair is None else pair.head_family, environment)
    name = None if serving.worker is ServedBy.UNSUPPORTED else serving.worker
    return Answer(name, serving.reason)


def compare(folder: Path) -> Contract:
    """Compare everything that this package relies on with an SGLang that is not installed.

    Args:
        folder: holds `sglang/`, as an unpacked wheel does.

    Raises:
        ContractError: it does not.
    """
    names = relied_on(with_cpu=True)
    return Contract.of(len(names), Source(folder).mismatches(names))


def render(verdict: Verdict) -> str:
    """The verdict as text."""
    lines = [
        f"sglang     {verdict.sglang or 'not installed'} (made for {SGLANG_VERSION})",
        *_render_contract(verdict.contract),
        f"plugin     {verdict.plugin.name or 'inactive'}: {verdict.plugin.reason}",
        f"platform   {verdict.platform.name or 'none'}: {verdict.platform.reason}",
        f"worker     {verdict.worker.name or 'none'}: {verdict.worker.reason}",
    ]
    if verdict.pair is not None:
        lines += _render_pair(verdict.pair)
    for flag in verdict.flags:
        answer = "served" if flag.served else "refused"
        lines.append(f"flag       {flag.flag} {flag.given}: {answer}, {flag.reason}")
    return "\n".join([*lines, "", "OK" if verdict.ok else "NOT OK"])


def _render_contract(contract: Contract) -> list[str]:
    return [
        f"contract   {'holds' if contract.ok else 'broken'}, {contract.checked} names checked",
        *(f"           {mismatch}" for mismatch in contract.mismatches),
    ]


def _render_pair(pair: PairReport) -> list[str]:
    family = "unreadable" if pair.head_family is None else pair.head_family.value
    lines = [f"pair       {family} head {pair.drafter} for {pair.verifier}"]
    for finding in pair.findings:
        lines += [
            f"  {finding.severity.value}: {finding.message} [{finding.code}]",
            f"    given: {finding.given}",
            f"    do:    {finding.fix}",
        ]
    lines += [f"  not checked: {text}" for text in pair.unchecked]
    return lines if pair.findings or pair.unchecked else [*lines, "  fits"]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m dflash_sglang.check", description=__doc__)
    parser.add_argument("--model-path", help="verifier: local folder or hub name")
    parser.add_argument("--speculative-draft-model-path", help="drafter: local folder or hub name")
    parser.add_argument(
        "--speculative-dflash-block-size", type=int, help="default: the trained one"
    )
    parser.add_argument("--tp-size", type=int, default=1)
    for field, (flag, values) in DRAFT_FLAGS.items():
        parser.add_argument(flag, dest=field, metavar="VALUE", choices=values)
    parser.add_argument(
        "--against",
        type=Path,
        metavar="FOLDER",
        help="only compare what this package relies on with the SGLang unpacked in FOLDER, which "
        "holds sglang/ (unzip a wheel there)",
    )
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON")
    arguments = parser.parse_args(argv)
    if (arguments.model_path is None) != (arguments.speculative_draft_model_path is None):
        parser.error("--model-path and --speculative-draft-model-path go together")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0 when DFLASH can be served so, or the other SGLang has every name; else 1.
    """
    arguments = _arguments(argv)
    try:
        if arguments.against is not None:
            return _main_against(arguments.against, as_json=arguments.json)
        return _main(arguments)
    except (ConfigError, ContractError) as problem:
        print(problem, file=sys.stderr)
        return 1


def _main_against(folder: Path, *, as_json: bool) -> int:
    contract = compare(folder)
    if as_json:
        found = {"schema": SCHEMA, "against": str(folder), "contract": asdict(contract)}
        print(json.dumps(found, indent=2))
    else:
        lines = [f"sglang     {folder} (made for {SGLANG_VERSION})", *_render_contract(contract)]
        print("\n".join([*lines, "", "OK" if contract.ok else "NOT OK"]))
    return 0 if contract.ok else 1


def _main(arguments: argparse.Namespace) -> int:
    pair = None
    given = {field: getattr(arguments, field) for field in DRAFT_FLAGS}
    if arguments.model_path is not None:
        pair = check_pair(
            arguments.model_path,
            arguments.speculative_draft_model_path,
            arguments.speculative_dflash_block_size,
            tp_size=arguments.tp_size,
            with_draft_weights=arguments.speculative_draft_load_format != "dummy",
        )
    verdict = examine(os.environ, pair, given)
    print(json.dumps(verdict.as_dict(), indent=2) if arguments.json else render(verdict))
    return 0 if verdict.ok else 1


if __name__ == "__main__":
    sys.exit(main())
