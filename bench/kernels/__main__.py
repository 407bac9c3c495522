"""Do the Triton kernels compile well, how many bytes do they move, do their tests catch bugs?

    python -m bench.kernels --aot [--json FILE]        # compile for A100, H100, B200: the gate
    python -m bench.kernels --cold-start [--json FILE] # CPU seconds of what a start compiles
    python -m bench.kernels --bytes [--json FILE]      # bytes moved, ours and SGLang's
    python -m bench.kernels --mutants [OP ...]         # planted bugs: all must be caught

Exit status 1 when a kernel spills or loads narrowly, when a control passes, or when a bug survives.
The environment is that of ``. launch/env.sh``. docs/results/kernels.md explains the tables.
"""

import argparse
import sys
from collections.abc import Sequence

from bench import report


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the checks."""
    options = parse_options(argv)
    if options.aot:
        return check_compiled(options)
    if options.cold_start:
        return show_cold_start(options)
    if options.bytes:
        return show_bytes(options)
    return check_mutants(options)


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = report.new_parser("bench.kernels", __doc__, "rows of --aot, --cold-start or --bytes")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--aot", action="store_true", help="compile ahead of time and gate")
    what.add_argument("--cold-start", action="store_true", help="compile what a start does, timed")
    what.add_argument("--bytes", action="store_true", help="count bytes")
    what.add_argument("--mutants", nargs="*", metavar="OP", help="plant bugs in these ops, or all")
    return parser.parse_args(argv)


# Each check imports its own: the gate must not see TRITON_INTERPRET, the mutants must.


def check_compiled(options: argparse.Namespace) -> int:
    """Compile every launch; 1 when one does not pass or a control does."""
    from bench.kernels import aot

    compiled, controls = aot.compile_all(), aot.compile_controls()
    failed = [one for one in compiled if not one.passes]
    blind = [one for one in controls if one.passes]
    print(report.table(map(aot.as_row, [*compiled, *controls]), options.markdown))
    report.write_rows(options.json, list(map(aot.as_row, compiled)))
    for one in failed:
        print(f"FAILED: {one}")
    for one in blind:
        print(f"the gate is blind, this must not pass: {one}")
    print(f"{len(compiled) - len(failed)} of {len(compiled)} pass; {len(controls)} controls")
    return int(bool(failed or blind))


def show_cold_start(options: argparse.Namespace) -> int:
    """Compile and print."""
    from bench.kernels import cold_start

    rows = [row._asdict() for row in cold_start.measure()]
    print(report.table(rows, options.markdown))
    report.write_rows(options.json, rows)
    return 0


def show_bytes(options: argparse.Namespace) -> int:
    """Count and print."""
    from bench.kernels import traffic

    rows = [row._asdict() for row in traffic.count_all()]
    print(report.table(rows, options.markdown))
    report.write_rows(options.json, rows)
    return 0


def check_mutants(options: argparse.Namespace) -> int:
    """Plant every bug; 1 when one survives."""
    from bench.kernels import mutants

    verdicts = mutants.main(options.mutants)
    print(report.table((verdict._asdict() for verdict in verdicts), options.markdown))
    survivors = [verdict for verdict in verdicts if not verdict.caught]
    print(f"{len(verdicts) - len(survivors)} of {len(verdicts)} caught")
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main())
