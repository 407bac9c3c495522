"""Ops that a steady decode step dispatches outside the two model forwards, ours and SGLang's.

    python -m bench.step launches [--json FILE]

Both workers run their own code on fake CUDA tensors (`bench/harness/fake_gpu`): an overlapped
server, one rank, the whole block verified, context KV in bfloat16. An op is counted when it makes
or changes memory on the device; views and allocations are not. Two of ours are two launches each:
`draft_tail`, which is inside the draft graph, and `accept_sampled`. The attention plan is
SGLang's FlashInfer backend's, for both workers alike, and has a section of its own.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple
from unittest import mock

from torch import Tensor

from bench import report
from bench.harness.fake_gpu.capture_guard import SECTIONS, CaptureGuard
from bench.harness.fake_gpu.fakes import FakeServer, fake_gpu
from bench.harness.fake_gpu.our_worker import make_worker
from bench.harness.fake_gpu.sglang_worker import SGLangStep
from bench.harness.fake_gpu.traffic import BLOCK, Traffic, make_batch, new
from dflash_sglang.core.sampled_draft import Candidates
from dflash_sglang.step.state import DraftState

BUDGET = {"greedy": 12, "sampled": 16}  # ops of a step outside the forwards


class Row(NamedTuple):
    """The ops of one worker's step."""

    worker: str  # ours or sglang
    requests: str  # greedy, or sampled: by temperature alone
    width: int  # verified tokens of each request
    section: str  # see bench.harness.fake_gpu.capture_guard
    ops: int
    names: str


class OurStep:
    """Decode steps of this package's worker."""

    def __init__(self, server: FakeServer, *, narrows: bool = False) -> None:
        self._server = server
        self.worker = make_worker(server, narrows=narrows)

    def run(self, traffic: Traffic) -> CaptureGuard:
        """One steady step.

        Raises:
            CaptureError: it reads the device or copies between device and host.
        """
        state = DraftState(bonus_tokens=new(traffic.batch), new_seq_lens=new(traffic.batch))
        batch = make_batch(traffic, state)
        publish = self._server.publish(batch.req_pool_indices)
        choice = mock.patch.object(self.worker._widths, "choose", return_value=traffic.width)
        with choice, self._server.guarded() as guard:
            self.worker.forward_batch_generation(batch, on_publish=publish)
        return guard

    def statics(self) -> dict[str, Tensor]:
        """Tensors whose memory captured graphs know."""
        pool = self._server.pool
        named = {"the table of slots": self._server.req_to_token}
        for width, parts in self.worker._drafter._by_width.items():
            for name, buffer in zip(Candidates._fields, parts.tail.buffers, strict=True):
                named[f"candidates' {name} at width {width}"] = buffer
        bound = self.worker._bound
        if bound is not None:
            named["the bound"] = bound.tokens
            named |= {f"tables of width {w}": table for w, table in bound._tables.items()}
        named |= {f"keys of layer {i}": one for i, one in enumerate(pool.k_buffer)}
        return named | {f"values of layer {i}": one for i, one in enumerate(pool.v_buffer)}


def count_all() -> list[Row]:
    """Both workers, greedy and sampled; ours at a narrower width as well."""
    rows = []
    for requests in ("greedy", "sampled"):
        traffic = Traffic(batch=4, sampled=requests == "sampled")
        for worker, width in (("ours", BLOCK), ("ours", BLOCK // 2), ("sglang", BLOCK)):
            with fake_gpu():
                server = FakeServer()
                step = OurStep(server) if worker == "ours" else SGLangStep(server)
                step.run(traffic._replace(width=width))  # the first step makes what the others keep
                guard = step.run(traffic._replace(width=width))
            rows += [
                Row(worker, requests, width, one, len(guard.ops(one)), _names(guard.ops(one)))
                for one in SECTIONS
            ]
    return rows


def _names(ops: Sequence[str]) -> str:
    """Ops in the order of their first appearance, repeated ones with their number."""
    counted = Counter(ops)
    short = {op: op.removeprefix("aten::").replace("dflash_bench::", "") for op in counted}
    return ", ".join(short[op] + (f" x{n}" if n > 1 else "") for op, n in counted.items())


def main(argv: Sequence[str] | None = None) -> int:
    """Count and print."""
    given = report.new_parser("bench.step.launches", __doc__).parse_args(argv)
    rows = [row._asdict() for row in count_all()]
    print(report.table(rows, given.markdown))
    report.write_rows(given.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
