"""What was measured so far: kept in a file after every server, and read again by the next run."""

import csv
import io
import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from bench.gpu.serve.options import Options
from launch.report import provenance

_GPU_FIELDS = ("name", "memory.total", "driver_version", "compute_cap")


class ResultsError(RuntimeError):
    """A folder of results that this run cannot go on with."""


class Run(NamedTuple):
    """One configuration of one pair."""

    pair: str
    configuration: str
    says: str
    status: str  # see measure.py
    start: Mapping[str, Any]
    loads: Sequence[Mapping[str, Any]]
    error: str | None
    advice: str | None


class Results:
    """Results so far.

    Args:
        out: the folder.
        setup: machine, versions and options that they rest on.
        pairs: what the report says of each pair.
    """

    def __init__(self, out: Path, setup: Mapping[str, Any], pairs: Sequence[Mapping[str, Any]]):
        self.out = out
        self.setup = setup
        self.pairs = {str(pair["name"]): pair for pair in pairs}
        self.runs: list[Run] = []
        self.tools: list[Mapping[str, Any]] = []

    @classmethod
    def open(cls, options: Options, pairs: Sequence[Mapping[str, Any]]) -> Self:
        """New results, or those of an interrupted run with the same options and versions.

        Raises:
            ResultsError: the folder holds results of something else.
        """
        results = cls(options.out, new_setup(options), pairs)
        options.out.mkdir(exist_ok=True)
        if results.file.exists() and not options.fresh:
            results._go_on(json.loads(results.file.read_text(encoding="utf-8")))
        else:
            for answers in options.out.glob("answers-*.json"):
                answers.unlink()
        results.save()
        return results

    def _go_on(self, earlier: Mapping[str, Any]) -> None:
        for key in ("options", "versions", "commit", "gpus"):
            if earlier["setup"][key] != self.setup[key]:
                raise ResultsError(
                    f"{self.out} holds results with other {key} ({earlier['setup'][key]} instead "
                    f"of {self.setup[key]}). Give another --out, or --fresh to measure again."
                )
        # What failed or was cut short is measured again.
        self.runs = [Run(**run) for run in earlier["runs"] if run["status"] == "ok"]
        self.tools = list(earlier["tools"])
        self.pairs = {**{pair["name"]: pair for pair in earlier["pairs"]}, **self.pairs}

    @property
    def file(self) -> Path:
        """The file of the results."""
        return self.out / "results.json"

    def has(self, pair: str, configuration: str) -> bool:
        """Whether it has been measured."""
        return any((run.pair, run.configuration) == (pair, configuration) for run in self.runs)

    def add(self, run: Run) -> None:
        """Keeps a configuration's results."""
        self.runs.append(run)
        self.save()

    def has_tool(self, row: Mapping[str, Any]) -> bool:
        """Whether a tool has said something of a pair at a width."""
        return any(row.items() <= tool.items() for tool in self.tools)

    def add_tool(self, row: Mapping[str, Any]) -> None:
        """Keeps what a tool said."""
        self.tools.append(row)
        self.save()

    def save(self) -> None:
        """Writes the file, whole or not at all."""
        content = {
            "setup": self.setup,
            "pairs": list(self.pairs.values()),
            "runs": [run._asdict() for run in self.runs],
            "tools": self.tools,
        }
        written = self.file.with_suffix(".tmp")
        written.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        written.replace(self.file)

    # ---- plain decoding's answers, which never leave the machine -------------------------------

    def keep_answers(self, pair: str, answers: Mapping[int, Sequence[Sequence[int]]]) -> None:
        """Output ids of plain decoding by concurrency."""
        self._answers(pair).write_text(json.dumps(answers), encoding="utf-8")

    def answers(self, pair: str) -> dict[int, list[list[int]]]:
        """Output ids of plain decoding by concurrency; empty if it was not measured."""
        file = self._answers(pair)
        if not file.exists():
            return {}
        return {int(key): value for key, value in json.loads(file.read_text()).items()}

    def _answers(self, pair: str) -> Path:
        return self.out / f"answers-{as_file_name(pair)}.json"


def as_file_name(name: str) -> str:
    """A name of a pair or a configuration, for a file."""
    return re.sub(r"[^\w.-]+", "-", name)


def new_setup(options: Options) -> dict[str, Any]:
    """What results rest on."""
    rests_on = provenance(None)
    del rests_on["arguments"]
    return {**rests_on, "gpus": gpus(), "options": dict(options.settles)}


def gpus() -> list[dict[str, str]]:
    """The machine's GPUs by nvidia-smi; none where it is not installed."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = csv.reader(io.StringIO(done.stdout if done.returncode == 0 else ""))
    return [
        dict(zip(_GPU_FIELDS, map(str.strip, row), strict=False)) for row in rows if len(row) > 1
    ]
