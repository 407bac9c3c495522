"""How good is the width policy, and what could a better one gain?"""

import sys

from bench.report import run_room

TOOLS = ("simulator", "narrowing", "served", "bound", "ladders", "record", "plot")


def main(argv: list[str] | None = None) -> int:
    """Run one of the tools, or list them."""
    return run_room("bench.width", __doc__, TOOLS, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
