"""Drift of recurrent states over thousands of commits: TF32 replay against bfloat16 activations.

    python -m bench.rollback states --json docs/data/rollback_states.json

One layer of Qwen3.6-35B-A3B's size with random tokens, committed in blocks whose lengths are those
of recorded traces. The truth is the recurrence in float64 on activations that were never rounded.
Rounding the activations to bfloat16, which every 16-bit server does, moves the states by a certain
amount; each way to roll back then adds its own error on the same activations. Heads forget at
different speeds, from half-lives of one token to ten thousand, so slow accumulation would show.

Exit status 1 if a replay adds as much, in any head, as the activations' rounding causes in it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bench import report
from bench.progress import progress
from bench.rollback.tf32 import Products, commit, verify
from bench.rollback.tokens import Activations, Size, tokens
from dflash_sglang.cpu.gated_delta.delta_rule import (
    TokenBlock,
    apply_updates,
    gates,
    run_block,
    unit_length,
)

COMMITS = 3000
OUTPUTS_OF = 100  # commits whose outputs' errors are averaged
REGIMES = {"independent tokens": False, "convolved tokens": True}
ACTIVATIONS = "bfloat16 activations"
SNAPSHOTS = "snapshots"
REPLAYS = {f"replay, {products}": products for products in Products}
WAYS = (SNAPSHOTS, *REPLAYS)  # to roll back
# Also shown with what the activations cause.
IN_ALL = (SNAPSHOTS, f"replay, {Products.TRUNCATED}")


class Layer:
    """The states of one request by every way, and the truths they are compared with."""

    def __init__(self, size: Size) -> None:
        shape = (1, size.heads, size.dim, size.dim)
        self._a_log = size.a_log()
        self._exact = torch.zeros(shape, dtype=torch.float64)
        self._rounded = torch.zeros(shape, dtype=torch.float64)
        self._states = {way: torch.zeros(shape) for way in WAYS}

    def step(self, drawn: Activations) -> dict[str, tuple[Tensor, Tensor]]:
        """Commit some tokens everywhere.

        Returns:
            By source of error, the relative errors of the outputs and of the states, each [heads].
        """
        exact_read, self._exact = _truth(self._exact, self._block(drawn, torch.float64))
        rounded = drawn.rounded()
        read, self._rounded = _truth(self._rounded, self._block(rounded, torch.float64))
        errors = {ACTIVATIONS: (_error(read, exact_read), _error(self._rounded, self._exact))}
        block = self._block(rounded, torch.float32)
        for way, state in self._states.items():
            if way == SNAPSHOTS:
                outputs, state = sequential(state, block)
            else:
                outputs, updates = verify(state, block, REPLAYS[way])
                state = commit(state, updates)
            self._states[way] = state
            errors[way] = _error(outputs, read), _error(state, self._rounded)
            if way in IN_ALL:
                both = _error(outputs, exact_read), _error(state, self._exact)
                errors[f"{ACTIVATIONS} and {way}"] = both
        return errors

    def _block(self, drawn: Activations, dtype: torch.dtype) -> TokenBlock:
        decay, beta = gates(drawn.a, drawn.b, self._a_log, torch.zeros(()), dtype)
        query, key = (unit_length(part.to(dtype)) for part in (drawn.query, drawn.key))
        scale = query.shape[-1] ** -0.5
        return TokenBlock(query * scale, key, drawn.value.to(dtype), decay.mT, beta.mT)


def sequential(state: Tensor, block: TokenBlock) -> tuple[Tensor, Tensor]:
    """Outputs of a block and the state after it, token after token, as the verify with snapshots.

    Source: sglang/kernels/ops/attention/linear/fused_sigmoid_gating_recurrent.py, which multiplies
        by elements and sums in float32.
    """
    share = block.value.shape[1] // block.key.shape[1]
    query, key = (part.repeat_interleave(share, 1) for part in (block.query, block.key))
    outputs = torch.empty_like(block.value)
    for t in range(block.value.shape[2]):
        state = state * block.decay[..., t, None, None].exp()
        held = (state * key[:, :, t, None, :]).sum(-1)
        update = block.beta[..., t, None] * (block.value[:, :, t] - held)
        state = state + update[..., None] * key[:, :, t, None, :]
        outputs[:, :, t] = (state * query[:, :, t, None, :]).sum(-1)
    return outputs, state


def measure(size: Size, regime: str, marks: Sequence[int]) -> list[dict[str, Any]]:
    """Errors after some numbers of commits, `marks`, in one of the `REGIMES`."""
    layer, rows, count = Layer(size), list[dict[str, Any]](), 0
    outputs: dict[str, list[Tensor]] = {}
    commits = max(marks)
    drawn = tokens(size, commits, convolve=REGIMES[regime])
    for number, one in enumerate(progress(drawn, unit="commits", total=commits), 1):
        count += one.value.shape[2]
        errors = layer.step(one)
        for name, (output, _) in errors.items():
            outputs.setdefault(name, []).append(output)
        if number not in marks:
            continue
        for name, (_, state) in errors.items():
            output = torch.stack(outputs[name][-OUTPUTS_OF:]).mean(0)
            where = {"regime": regime, "commits": number, "tokens": count, "error": name}
            rows.append(where | _spread("state", state) | _spread("output", output))
    return rows


def shares(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each way adds, as a share of what the activations cause, in the worst head."""
    caused = {(row["regime"], row["commits"]): row for row in rows if row["error"] == ACTIVATIONS}
    return [
        {
            **{key: row[key] for key in ("regime", "commits", "error")},
            **{
                f"{what} share": _worst_share(row, caused[row["regime"], row["commits"]], what)
                for what in ("state", "output")
            },
        }
        for row in rows
        if row["error"] in WAYS
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the tables and keep them."""
    parser = report.new_parser("bench.rollback states", __doc__, "result")
    parser.add_argument("--commits", type=int, default=COMMITS, help="of each regime")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    given = parser.parse_args(argv)
    torch.set_num_threads(given.threads)
    begin = time.perf_counter()
    marks = sorted({max(1, given.commits // part) for part in (30, 3, 1)})
    rows = [row for regime in REGIMES for row in measure(Size(), regime, marks)]
    added = shares(rows)
    print(report.table([_shown(row, ".1e") for row in rows], given.markdown))
    print()
    print(report.table([_shown(row, ".2f") for row in added], given.markdown))
    seconds = round(time.perf_counter() - begin, 1)
    report.write_json(given, {"seconds": seconds, "errors": rows, "shares": added})
    within = all(max(row["state share"], row["output share"]) < 1 for row in added)
    return 0 if within else 1


def _truth(state: Tensor, block: TokenBlock) -> tuple[Tensor, Tensor]:
    outputs, updates = run_block(state, block)
    return outputs, apply_updates(state, updates)


def _error(got: Tensor, wanted: Tensor) -> Tensor:
    """[heads], relative, by the Frobenius norm."""
    return (got.double() - wanted).norm(dim=(-2, -1))[0] / wanted.norm(dim=(-2, -1))[0]


def _spread(what: str, error: Tensor) -> dict[str, Any]:
    """Over heads; all of them are kept, in the order of their half-lives."""
    return {
        f"{what} median": float(error.median()),
        f"{what} worst": float(error.max()),
        f"{what} by head": [float(f"{value:.3g}") for value in error],
    }


def _worst_share(added: dict[str, Any], caused: dict[str, Any], what: str) -> float:
    by_head = zip(added[f"{what} by head"], caused[f"{what} by head"], strict=True)
    return max(one / other for one, other in by_head)


def _shown(row: dict[str, Any], form: str) -> dict[str, Any]:
    return {
        key: format(value, form) if isinstance(value, float) else value
        for key, value in row.items()
        if not isinstance(value, list)
    }


if __name__ == "__main__":
    sys.exit(main())
