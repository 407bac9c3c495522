"""How many requests fit on a GPU beside the recurrent states, with snapshots and with replay?

    python -m bench.memory
    python -m bench.memory widths       what widths add, see bench/memory/widths.py

The bytes that a request slot takes for rolling back recurrent layers, and how many running requests
fit, for Qwen3.6-35B-A3B on one 141 GB GPU with bfloat16 weights. Computed, not measured:
docs/results/recurrent-state.md has the assumptions.
"""

import sys
from collections.abc import Sequence

from bench import report
from bench.memory.recurrent_state import BLOCK, H200, LENGTH, QWEN36


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments[:1] == ["widths"]:
        from bench.memory import widths  # loads SGLang, which the rest does not need

        return widths.main(arguments[1:])
    given = report.new_parser("bench.memory", __doc__).parse_args(arguments)
    print(f"one state: {QWEN36.state() / 1e6:.1f} MB; computed, block {BLOCK}, {H200}")
    snapshots = QWEN36.snapshots(BLOCK)
    rows = [
        {
            "scheme": scheme,
            "MB a request slot": f"{scratch / 1e6:.1f}",
            "of snapshots": f"{scratch / snapshots:.1%}",
            "running requests": H200.requests(QWEN36, scratch),
            "SGLang's division": H200.requests_by_default(QWEN36, BLOCK, length),
        }
        for scheme, scratch, length in (
            ("snapshot", snapshots, 0),
            ("replay", QWEN36.record(BLOCK, LENGTH), LENGTH),
        )
    ]
    print(report.table(rows, given.markdown))
    report.write_rows(given.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
