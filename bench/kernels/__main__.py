"""What can be said of the Triton kernels without a GPU.

    python -m bench.kernels --aot [--json FILE]        # compile for A100, H100, B200: the gate
    python -m bench.kernels --bytes [--json FILE]      # bytes moved, ours and SGLang's
    python -m bench.kernels --mutants [OP ...]         # planted bugs: all must be caught

Exit status 1 when a kernel spills or loads narrowly, when a control passes, or when a bug survives.
The environment is that of ``. launch/env.sh``. docs/kernels.md explains the tables.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def main() -> int:
    """Run one of the checks."""
    options = parse_options()
    if options.aot:
        return check_compiled(options.json)
    if options.bytes:
        return show_bytes(options.json)
    return check_mutants(options.mutants)


def parse_options() -> argparse.Namespace:
    """Options of the command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="bench.kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--aot", action="store_true", help="compile ahead of time and gate")
    what.add_argument("--bytes", action="store_true", help="count bytes")
    what.add_argument("--mutants", nargs="*", metavar="OP", help="plant bugs in these ops, or all")
    parser.add_argument("--json", type=Path, help="write the rows of --aot or --bytes here")
    return parser.parse_args()


# Each check imports its own: the gate must not see TRITON_INTERPRET, the mutants must.


def check_compiled(file: Path | None) -> int:
    """Compile every launch; 1 when one does not pass or a control does."""
    from bench.kernels import aot as kernel_aot

    compiled, controls = kernel_aot.compile_all(), kernel_aot.compile_controls()
    failed = [one for one in compiled if not one.passes]
    blind = [one for one in controls if one.passes]
    print_table(map(kernel_aot.as_row, [*compiled, *controls]))
    write_json(file, list(map(kernel_aot.as_row, compiled)))
    for one in failed:
        print(f"FAILED: {one}")
    for one in blind:
        print(f"the gate is blind, this must not pass: {one}")
    print(f"{len(compiled) - len(failed)} of {len(compiled)} pass; {len(controls)} controls")
    return int(bool(failed or blind))


def show_bytes(file: Path | None) -> int:
    """Count and print."""
    from bench.kernels import traffic as kernel_bytes

    rows = [row._asdict() for row in kernel_bytes.count_all()]
    print_table(rows)
    write_json(file, rows)
    return 0


def check_mutants(ops: Sequence[str]) -> int:
    """Plant every bug; 1 when one survives."""
    from bench.kernels import mutants as kernel_mutants

    verdicts = kernel_mutants.main(ops)
    print_table(verdict._asdict() for verdict in verdicts)
    survivors = [verdict for verdict in verdicts if not verdict.caught]
    print(f"{len(verdicts) - len(survivors)} of {len(verdicts)} caught")
    return int(bool(survivors))


def print_table(rows: Iterable[Mapping[str, Any]]) -> None:
    """A table in Markdown, columns in the rows' order."""
    for number, row in enumerate(rows):
        if number == 0:
            print("|", " | ".join(row), "|")
            print("|" + "---|" * len(row))
        print("|", " | ".join(map(str, row.values())), "|")


def write_json(file: Path | None, rows: Sequence[Mapping[str, Any]]) -> None:
    """One row a line."""
    if file is not None:
        file.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


if __name__ == "__main__":
    sys.exit(main())
