"""Are the kernels right and fast on this GPU? One run of less than eight minutes.

    bench/gpu_check.sh [--json FILE]           # or python -m bench.gpu
    bench/gpu_check.sh --only ops --small      # what it runs under compute-sanitizer

Needs one CUDA GPU, and torch and Triton no older than in constraints.txt; compute-sanitizer and
FlashInfer are used where they are. Without a GPU it runs to the end, compares the references with
themselves, and reports what it skipped. Exit status 1 when a check fails.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from bench.gpu import checks
from bench.gpu.results import Result, Results, machine

LIMIT = 400  # seconds, after which no check is begun

# In this order: first what a wrong result would show, then what takes long.
CHECKS: Mapping[str, Callable[[bool], Iterator[Result]]] = {
    "versions": lambda _: checks.check_versions(),
    "ops": checks.check_ops,
    "graphs": lambda _: checks.check_graphs(),
    "speed": lambda _: checks.check_speed(),
    "sanitizer": lambda _: checks.check_sanitizer(),
    "attention": lambda _: checks.check_attention_apart(),
}
APART = {"attention-here": lambda _: checks.check_attention_here()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks."""
    options = parse_options(argv)
    found = Results(options.json)
    print("  ".join(f"{name} {value}" for name, value in machine().items()))
    chosen = {options.only: {**CHECKS, **APART}[options.only]} if options.only else CHECKS
    for name, check in chosen.items():
        if found.seconds > options.limit:
            found.add(Result(name, "all", None, f"not begun after {options.limit} s"))
            continue
        for result in to_the_end(name, check(options.small)):
            found.add(result)
    counted = [sum(r.passed is verdict for r in found.rows) for verdict in (True, False, None)]
    print("{} ok, {} failed, {} skipped".format(*counted), f"in {found.seconds:.0f} s")
    return int(found.failed)


def to_the_end(name: str, results: Iterator[Result]) -> Iterator[Result]:
    """The results of a check; an exception fails it and lets the next one run."""
    try:
        yield from results
    except Exception as problem:
        yield Result(name, "stopped", False, repr(problem)[:300])


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(
        prog="bench/gpu_check.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--only", choices=[*CHECKS, *APART], help="one check")
    parser.add_argument("--small", action="store_true", help="ops: no large vocabularies")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds; default: %(default)s")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
