"""Everything that this package relies on in SGLang, and whether a release has it.

`python -m dflash_sglang.check` looks it up in the installed release, `check --against FOLDER` in
another one, and a test in the pinned wheel. A server does none of that: it compares the version.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from dflash_sglang.preflight.own_uses import imported_names, parameters_of
from dflash_sglang.preflight.refused_flags import REFUSED, WITHOUT_EFFECT
from dflash_sglang.preflight.sglang_table import CPU, WORKER
from dflash_sglang.preflight.source import FLAGS, Mismatch, Name, Source
from dflash_sglang.preflight.version import SGLANG_VERSION, installed_version

_MEMBER = re.compile(r"([\w.]+)(\([^)]*\))?")


def relied_on(*, with_cpu: bool) -> list[Name]:
    """Every name that matters here: the worker's, and the CPU platform's where it serves."""
    flags = [Name(f"{FLAGS}:{flag.field}", flag.flag) for flag in REFUSED + WITHOUT_EFFECT]
    listed = [*listed_names(WORKER), *(listed_names(CPU) if with_cpu else ())]
    return [*flags, *listed, *imported_names(with_cpu=with_cpu)]


def listed_names(table: str) -> Iterator[Name]:
    """The entries of a table, in its order.

    Args:
        table: as `sglang_table` describes.
    """
    for entry in re.split(r"\n(?=\w)", re.sub(r"(?m)^#.*\n", "", table.strip())):
        head, _, members = entry.partition("\n")
        owner, why, *ours = head.split(" | ")
        for member, given in _MEMBER.findall(members):
            params = tuple(re.findall(r"\w+", given))
            if ours and not given:
                params = parameters_of(ours[0], member)
            joint = "" if owner.endswith(":") else "."
            yield Name(f"sglang.{owner}{joint}{member}", why, params)


def check_installed(names: list[Name]) -> list[Mismatch]:
    """Compare the installed SGLang with names that we rely on.

    Returns:
        Those that do not match, in the order given; none when SGLang is as expected.
    """
    version, source = installed_version(), Source.installed()
    if version is None or source is None:
        return [Mismatch(Name("sglang", "everything"), "not installed")]
    mismatches = source.mismatches(names)
    if version != SGLANG_VERSION:
        release = Name("sglang", f"this release of the plugin, made for {SGLANG_VERSION}")
        mismatches.insert(0, Mismatch(release, f"version {version}"))
    return mismatches
