"""Train an embedded pair, verifier and drafter, from nothing but a seed.

    python -m bench.train --work FOLDER [--model moe|hybrid]

The stages (data, verifier, drafter, pack, evaluate) write into FOLDER and are skipped if their
result exists, so that an interrupted run continues where it stopped. FOLDER/pair is what
dflash_sglang/zoo/MODEL holds. All pairs share their data. One quiet core takes about an hour for
the MoE pair (1.2 s a step of the verifier, 0.4 s a step of the drafter), and half of that for the
hybrid pair (0.6 s and 0.4 s).
"""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from bench import report
from bench.train import stages
from bench.train.recipes import RECIPES


def run_stage(name: str, result: Path, stage: Callable[[], None]) -> None:
    """Run a stage, unless its result exists."""
    if result.exists():
        print(f"== {name}: {result.name} exists, skipped", flush=True)
        return
    print(f"== {name}", flush=True)
    started = time.monotonic()
    stage()
    print(f"== {name} took {(time.monotonic() - started) / 60:.1f} min", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all stages that have no result yet."""
    parser = report.new_parser("bench.train", __doc__, result=None)
    parser.add_argument("--work", type=Path, required=True, help="folder of intermediate results")
    parser.add_argument("--model", default="moe", choices=RECIPES, help="default: moe")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument(
        "--no-compile", action="store_true", help="do without a C++ compiler: slower"
    )
    given = parser.parse_args(argv)
    torch.set_num_threads(given.threads)
    work: Path = given.work
    work.mkdir(parents=True, exist_ok=True)
    recipe, compiled = RECIPES[given.model], not given.no_compile
    todo: list[tuple[str, str, Callable[[], None]]] = [
        ("data", "corpus.npz", lambda: stages.data_stage(work)),
        ("verifier", "verifier.json", lambda: stages.verifier_stage(work, recipe, compiled)),
        ("drafter", "drafter.json", lambda: stages.drafter_stage(work, recipe, compiled)),
        ("pack", "pair/prompts.json", lambda: stages.pack_stage(work, recipe)),
        ("evaluate", "pair/CARD.md", lambda: stages.evaluate_stage(work, given.model)),
    ]
    for name, result, stage in todo:
        run_stage(name, work / result, stage)
    return 0


if __name__ == "__main__":
    sys.exit(main())
