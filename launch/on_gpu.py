"""What the demo says of a run on a GPU, where near-ties of bfloat16 may change answers."""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence

from dflash_sglang import zoo
from launch.comparison import FIXED, Options, say
from launch.report import PLAIN, Pass, tau_by_family

# Least share of the float32 tau that bfloat16 must reach, the mean over the families of prompts.
# The demo's few prompts of a family scatter by 6 % around the 30 of the pair's evaluation; a block
# with wrong attention, positions or context commits little more than one token a verify.
LEAST_TAU = 0.8


def judge(passes: Sequence[Pass], options: Options, families: Sequence[str]) -> bool:
    """Reports equal answers and compares tau; False where tau is too low.

    Args:
        passes: all measured passes, among them plain decoding's and those of a fixed width.
        options: what was compared.
        families: the family of each prompt.
    """
    report_equal_answers(passes)
    expected = expected_tau(options.model, options.block_size)
    if not expected:
        say(f"tau is not compared: the pair was not evaluated at blocks of {options.block_size}")
        return True
    got = tau_by_family(passes, FIXED, families)
    share = share_of(got, expected)
    listed = ", ".join(
        f"{family} {tau:.1f} ({expected[family]:.1f})" for family, tau in got.items()
    )
    say(
        f"tau of {FIXED}, in brackets in float32 on a CPU: {listed}\n"
        f"that is {share:.2f} of it; at least {LEAST_TAU} is expected"
    )
    if share < LEAST_TAU:
        say(
            "tau is too low for rounding: drafts are accepted less often than they should be. "
            "Please report it with the output of bench/gpu_serve.sh; `DFLASH_SGLANG_WORKER=builtin`"
            " serves with SGLang's own worker meanwhile"
        )
    return share >= LEAST_TAU


def expected_tau(model: str, block_size: int) -> dict[str, float]:
    """Tau by family of prompts from the pair's own evaluation; empty for another block size."""
    evaluation = json.loads((zoo.path(model).drafter.parent / "eval.json").read_text())
    block: Mapping[str, dict[str, float]] = evaluation["blocks"].get(str(block_size), {})
    return dict(block.get("tau_by_family", {}))


def share_of(got: Mapping[str, float], expected: Mapping[str, float]) -> float:
    """Mean over families of tau over the expected one."""
    return statistics.fmean(tau / expected[family] for family, tau in got.items())


def report_equal_answers(passes: Iterable[Pass]) -> None:
    """Says how many answers of each mode and concurrency equal the first ones of plain decoding."""
    listed = list(passes)
    reference = next(done.load for done in listed if done.mode == PLAIN).answers
    first: dict[tuple[str, int], Pass] = {}
    for done in listed:
        first.setdefault((done.mode, done.concurrency), done)
    for (mode, concurrency), done in first.items():
        pairs = zip(done.load.answers, reference, strict=True)
        equal = sum(answer.output_ids == expected.output_ids for answer, expected in pairs)
        say(f"{mode} at concurrency {concurrency}: {equal} of {len(reference)} answers equal plain")
