"""What all tools of bench/ share: command line, tables, result files, rooms of several tools."""

import argparse
import ast
import importlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from launch.report import ROOT, provenance

DATA = ROOT / "docs" / "data"  # results that the documentation quotes
# Options for where results go; they do not change what is measured.
_OUTPUT = ("json", "markdown", "svg")

# A column is aligned to the right if every cell in it begins like a number.
_NUMBER = frozenset("+-.0123456789")


def new_parser(tool: str, doc: str | None, result: str | None = "rows") -> argparse.ArgumentParser:
    """The command line of a tool; the tool adds its own options.

    Args:
        tool: the module that runs, such as `bench.serve.study`.
        doc: the module's docstring, which `--help` shows.
        result: what `--json` writes, for `--help`; None: a tool without `--json`, `--markdown`.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {tool}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if result is not None:
        parser.add_argument("--json", type=Path, metavar="FILE", help=f"write the {result} there")
        parser.add_argument("--markdown", action="store_true", help="print tables in Markdown")
    return parser


def table(rows: Iterable[Mapping[str, object]], markdown: bool = False) -> str:
    """The rows as aligned text or as a Markdown table.

    Args:
        rows: cells by column, with the same columns in every row. Text is shown as it is, so a
            tool formats its own numbers; True is "yes", False "NO", None "-".
        markdown: a Markdown table instead of plain text.
    """
    listed = list(rows)
    if not listed:
        return "(no rows)"
    cells = [[_cell(value) for value in row.values()] for row in listed]
    numeric = (
        all(cell == "-" or cell[:1] in _NUMBER for cell in column)
        for column in zip(*cells, strict=True)
    )
    text: str = tabulate(
        cells,
        headers=list(listed[0]),
        tablefmt="pipe" if markdown else "simple",
        colalign=["right" if one else "left" for one in numeric],
        disable_numparse=True,  # it would turn "2.00" into 2
    )
    return text


def write_json(
    given: argparse.Namespace,
    content: Mapping[str, object],
    *,
    key: str | None = None,
    **more: object,
) -> None:
    """Write a result and its provenance to the file of `--json`, if one is given.

    The provenance (`launch.report.provenance`) is machine, versions, commit, time and `arguments`:
    all options of the command line except where results go.

    Args:
        given: the parsed command line.
        content: the result; named tuples in it become objects.
        key: of the provenance; None: its parts stand beside the result.
        more: further arguments that the result rests on, constants of the tool.
    """
    if given.json is None:
        return
    options = {name: value for name, value in vars(given).items() if name not in _OUTPUT}
    rests_on = provenance({**options, **more})
    result = {**content, **(rests_on if key is None else {key: rests_on})}
    given.json.write_text(json.dumps(_plain(result), indent=1) + "\n", encoding="utf-8")


def write_rows(file: Path | None, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows alone as a list, one row a line; for results that no machine influences."""
    if file is not None:
        file.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")


def run_room(room: str, doc: str | None, tools: Sequence[str], argv: Sequence[str]) -> int:
    """Run one of several tools: `python -m bench.exactness corpus --tokens 50000`.

    Args:
        room: the package, such as `bench.exactness`.
        doc: its question, which `--help` shows above the list of tools.
        tools: names of modules in the room, with dashes for underscores, in the order of the list.
        argv: the name of a tool and that tool's own arguments.

    Returns:
        The exit status.
    """
    if argv and argv[0] in tools:
        module = importlib.import_module(f"{room}.{argv[0].replace('-', '_')}")
        status: int = module.main(argv[1:])
        return status
    width = max(map(len, tools))
    listed = "\n".join(f"  {tool:<{width}}  {_summary(room, tool)}" for tool in tools)
    parser = argparse.ArgumentParser(
        prog=f"python -m {room}",
        usage="%(prog)s TOOL [OPTION ...]",
        description=f"{(doc or '').strip()}\n\ntools (TOOL --help shows the options):\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("tool", choices=tools, metavar="TOOL", help=argparse.SUPPRESS)
    parser.parse_args(argv[:1])
    raise AssertionError("argparse accepts no other first argument")


def _summary(room: str, tool: str) -> str:
    """First line of a tool's docstring, read without importing what it needs."""
    file = ROOT.joinpath(*room.split("."), tool.replace("-", "_")).with_suffix(".py")
    doc = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return doc.partition("\n")[0]


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return str(value)


def _plain(value: Any) -> Any:
    """What `json` can write; paths relative to the checkout, so that a file names no machine's."""
    if hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Path):
        return str(value.relative_to(ROOT)) if value.is_relative_to(ROOT) else str(value)
    return value
