"""What does one decode step dispatch, and where does its time go?"""

import sys

from bench.report import run_room

TOOLS = ("launches", "profile", "host")


def main(argv: list[str] | None = None) -> int:
    """Run one of the tools, or list them."""
    return run_room("bench.step", __doc__, TOOLS, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
