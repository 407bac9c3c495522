"""Are the answers those of plain decoding, with every feature, configuration and accept rule?"""

import sys

from bench.report import run_room

TOOLS = ("features", "identity", "corpus", "draws", "sampled-drafts")


def main(argv: list[str] | None = None) -> int:
    """Run one of the tools, or list them."""
    return run_room("bench.exactness", __doc__, TOOLS, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
