"""How fast are DFLASH servers beside plain decoding and SGLang's own worker?"""

import sys

from bench.report import run_room

TOOLS = ("study", "plot")


def main(argv: list[str] | None = None) -> int:
    """Run one of the tools, or list them."""
    return run_room("bench.serve", __doc__, TOOLS, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
