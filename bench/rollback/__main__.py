"""How far does a replay in TF32 move recurrent states and answers, beside bfloat16 activations?"""

import sys

from bench.report import run_room

TOOLS = ("states", "prompts")


def main(argv: list[str] | None = None) -> int:
    """Run one of the tools, or list them."""
    return run_room("bench.rollback", __doc__, TOOLS, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
