"""One file to attach to a report: results and logs without what is private to the machine."""

import getpass
import importlib.metadata
import json
import os
import re
import socket
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.serve.options import Options
from bench.gpu.serve.pairs import Pair
from launch.report import ROOT

_PACKAGES = re.compile(
    r"^(sglang|torch|triton|flashinfer|transformers|nvidia|cuda|numpy|xgrammar|dflash)"
)
_VARIABLES = re.compile(r"^(SGLANG|DFLASH|CUDA|HIP|TRITON|NCCL|FLASHINFER|PYTORCH|OMP)_")
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL|AUTH", re.IGNORECASE)
# In SGLang's first log line, which repeats every argument.
_SECRET_ARGUMENT = re.compile(
    r"(\b\w*(?:api_key|key_password|hf_token|secret|password)\b['\"]?\s*[=:]\s*)(['\"]).*?\2",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(r"\b(hf_|sk-|ghp_|github_pat_)[A-Za-z0-9_-]{8,}")
_ADDRESS = re.compile(r"(?<![\w.])(?!127\.0\.0\.1\b|0\.0\.0\.0\b)\d{1,3}(?:\.\d{1,3}){3}\b(?!\.\d)")
# Whatever is left of a path: at least two parts, so that a route such as /generate stays.
_PATH = re.compile(r"(?<![\w.<>:/-])~?/(?:[\w.@+=-]+/)+[\w.@+=-]*")


class Redactor:
    """Takes out of a text what names the machine, its user or a private model.

    Args:
        names: what is replaced, by what; the longest first wherever one is part of another.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        known = {name: by for name, by in names.items() if len(name) > 2}
        self._names = sorted(known.items(), key=lambda pair: -len(pair[0]))

    def __call__(self, text: str) -> str:
        """The text without them."""
        for name, by in self._names:
            word = re.escape(name)
            # A path is replaced wherever it begins; a name as a whole word only.
            text = re.sub(word if "/" in name else rf"(?<!\w){word}(?!\w)", by, text)
        text = _SECRET_ARGUMENT.sub(r"\1\2<secret>\2", text)
        text = _SECRET_VALUE.sub("<secret>", text)
        text = _ADDRESS.sub("<address>", text)
        return _PATH.sub("<path>", text)

    def json(self, text: str) -> str:
        """A JSON document without them, in its keys and in its values."""

        def redacted(value: Any) -> Any:
            if isinstance(value, str):
                return self(value)
            if isinstance(value, list):
                return [redacted(one) for one in value]
            if isinstance(value, dict):
                return {self(key): redacted(one) for key, one in value.items()}
            return value

        return json.dumps(redacted(json.loads(text)), indent=1)


def new_redactor(options: Options, pairs: Iterable[Pair]) -> Redactor:
    """What is known of this machine and of private models."""
    names = {
        str(options.out): "<out>",
        str(ROOT): "<checkout>",
        sys.prefix: "<python>",
        os.path.realpath(sys.prefix): "<python>",
        str(Path.home()): "<home>",
        tempfile.gettempdir(): "<temporary>",
        socket.gethostname(): "<host>",
        socket.getfqdn(): "<host>",
    }
    if (user := getpass.getuser()) != "root":
        names[user] = "<user>"
    for pair in pairs:
        if pair.private:
            for given, role in ((pair.verifier, "<verifier>"), (pair.drafter, "<drafter>")):
                if Path(given).exists():
                    names |= {given: role, str(Path(given).absolute()): role}
    names.pop("localhost", None)
    return Redactor(names)


def write(options: Options, pairs: Sequence[Pair]) -> Path:
    """Writes OUT/report.zip and returns its path."""
    redact = new_redactor(options, pairs)
    file = options.out / "report.zip"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as into:
        into.writestr("results.json", redact.json((options.out / "results.json").read_text()))
        into.writestr("report.md", redact((options.out / "report.md").read_text()))
        variables = redact.json(json.dumps(environment_variables()))
        # Versions as they are: some look like addresses.
        known = {"packages": packages(), "variables": json.loads(variables)}
        into.writestr("environment.json", json.dumps(known, indent=1))
        if options.gpu_check is not None:
            into.writestr("gpu_check.json", redact.json(options.gpu_check.read_text()))
        for log in sorted((options.out / "logs").rglob("*.log")):
            into.writestr(
                log.relative_to(options.out).as_posix(), redact(log.read_text(errors="replace"))
            )
    return file


def packages() -> dict[str, str]:
    """Versions of the packages that matter to serving."""
    found = {str(one.metadata["Name"]): one.version for one in importlib.metadata.distributions()}
    return {name: found[name] for name in sorted(found) if _PACKAGES.match(name)}


def environment_variables() -> dict[str, str]:
    """Those that matter to serving."""
    return {
        name: "<secret>" if _SECRET_NAME.search(name) else value
        for name, value in sorted(os.environ.items())
        if _VARIABLES.match(name)
    }
