"""The results as Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

from bench import report
from bench.gpu.serve.differences import NEAR_TIE
from bench.gpu.serve.results import Results, Run

_NOTES = f"""\
start: seconds until the server answers, with an empty Triton cache; in brackets once more with the
cache of the first start. Free: GB of the GPU's memory before and after the graphs of the widths.
Cold gap: the longest pause between two parts of an answer among the first requests after that
start, in brackets after the second start; cold first: the longest wait for a first token. Compiles:
of our ops after the server was ready; there should be none.

p50 and p99: milliseconds between tokens, a part's pause shared out over its tokens. Longest: the
longest pause between two parts of an answer. Widths: share of the steps at each width. Equal:
greedy answers equal to plain decoding's at the same concurrency, token by token (plain: to its own
at its lowest concurrency, which shows what batch shapes alone do). Gap: the largest difference of
log-probability at the first differing tokens; above {NEAR_TIE} it is no near-tie of rounding, so
please report it."""


def render(results: Results) -> str:
    """All tables."""
    setup = results.setup
    gpus = ", ".join(gpu["name"] for gpu in setup["gpus"]) or "no GPU"
    versions = ", ".join(f"{name} {value}" for name, value in setup["versions"].items())
    options = setup["options"]
    parts = [
        "# Serving on a GPU",
        f"{gpus}; {versions}; commit {setup['commit']}; {setup['time']}",
        f"Device {options['device']}, answers of at most {options['new_tokens']} tokens. "
        "One run, one server at a time.",
    ]
    if options["device"] == "cpu":
        parts.append("**On a CPU: this tries the flow. No number here says anything of a GPU.**")
    for name in results.pairs:
        runs = [run for run in results.runs if run.pair == name]
        if not runs:
            continue
        parts += [f"## {name}", report.table(map(start_row, runs), markdown=True)]
        loads = [load_row(run, load) for run in runs for load in run.loads]
        if loads:
            parts.append(report.table(loads, markdown=True))
        parts += [failure(run) for run in runs if run.error]
    if results.tools:
        parts += ["## Tools", report.table(results.tools, markdown=True)]
    return "\n\n".join([*parts, _NOTES]) + "\n"


def start_row(run: Run) -> dict[str, object]:
    """One server's start."""
    start = run.start
    memory, cold = start.get("memory", {}), start.get("cold", {})
    again = start.get("restart", {})
    return {
        "configuration": run.configuration,
        "status": run.status,
        "start, s": _with(start.get("seconds"), again.get("seconds")),
        "free, GB": _arrow(memory.get("before_widths_gb"), memory.get("free_gb")),
        "attention": start.get("attention_backend"),
        "draft attention": start.get("speculative_draft_attention_backend"),
        "requests": start.get("max_running_requests"),
        "cold gap, ms": _with(cold.get("longest_gap_ms"), again.get("longest_gap_ms")),
        "cold first, ms": _with(
            cold.get("longest_first_token_ms"), again.get("longest_first_token_ms")
        ),
        "compiles": len(start.get("compiles_while_serving", ())),
    }


def load_row(run: Run, load: Mapping[str, Any]) -> dict[str, object]:
    """One load."""
    compared = load.get("compared")
    return {
        "configuration": run.configuration,
        "sampling": load["sampling"],
        "concurrency": load["concurrency"],
        "tokens/s": f"{load['tokens_per_s']:.0f}",
        "tau": f"{load['tau']:.2f}",
        "p50, ms": _number(load["p50_ms"], 2),
        "p99, ms": _number(load["p99_ms"], 2),
        "longest, ms": _number(load["longest_gap_ms"], 0),
        "first token, ms": f"{load['first_token_ms']:.0f}",
        "widths": widths(load["steps_by_width"]),
        "equal": f"{load['equal']} of {compared}" if compared else None,
        "first difference": difference(load),
    }


def difference(load: Mapping[str, Any]) -> str | None:
    """Where the first differing answer leaves plain decoding's, and the largest gap."""
    first = load.get("first")
    if first is None:
        return None
    gap = load["largest_gap"]
    return f"token {first['token']} of answer {first['prompt'] + 1}, gap " + (
        "unknown" if gap is None else f"{gap:.3f}"
    )


def widths(steps: Mapping[str, int]) -> str | None:
    """Shares of the steps by width, in percent."""
    total = sum(steps.values())
    listed = [f"{width}: {100 * n / total:.0f}%" for width, n in steps.items() if n]
    return ", ".join(listed) or None


def failure(run: Run) -> str:
    """Why a server failed, and what to do."""
    return f"**{run.configuration} failed.** {run.advice}\n\n```\n{run.error}\n```"


def _number(value: float | None, digits: int) -> str | None:
    return None if value is None else f"{value:.{digits}f}"


def _with(first: float | None, again: float | None) -> str | None:
    if first is None:
        return None
    return f"{first:.0f}" if again is None else f"{first:.0f} ({again:.0f})"


def _arrow(*values: float | None) -> str | None:
    known: Sequence[str] = [f"{value:.1f}" for value in values if value is not None]
    return " to ".join(known) or None
