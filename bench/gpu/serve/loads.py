"""The loads that each server of a pair gets, and what is read from it before and after one."""

from collections.abc import Mapping, Sequence
from typing import Any

from bench.gpu.serve import differences
from bench.gpu.serve.options import Options
from bench.gpu.serve.pairs import GREEDY, Pair
from bench.gpu.serve.streams import Streamed, send_all, summarize
from launch.client import Client

Answers = Mapping[int, Sequence[Sequence[int]]]  # output ids by concurrency


class Loader:
    """Sends the same loads to every server of a pair.

    Args:
        pair: whose prompts are sent.
        options: how many, and how long answers may be.
        reference: greedy answers of plain decoding; None for plain decoding itself.
    """

    def __init__(self, pair: Pair, options: Options, reference: Answers | None) -> None:
        self._pair, self._options, self._reference = pair, options, reference
        self.answers: dict[int, list[Sequence[int]]] = {}  # greedy ones so far, by concurrency

    def first_requests(self, server: Client) -> dict[str, float | None]:
        """Longest waits of the first requests after a start, which also warm the server up."""
        most = max(self._options.requests)
        waits = []
        for sampling in (GREEDY, self._pair.sampling):
            prompts = self._prompts(most)
            streamed, seconds = send_all(server, prompts, most, sampling, self._options.new_tokens)
            waits.append(summarize(streamed, seconds))
        gaps = [one.longest_gap_ms for one in waits if one.longest_gap_ms is not None]
        return {
            "longest_gap_ms": max(gaps, default=None),
            "longest_first_token_ms": max(one.longest_first_token_ms for one in waits),
        }

    def load(self, server: Client, sampling: str, concurrency: int) -> dict[str, Any]:
        """One load, "greedy" or with the model's "default" sampling: a row of the results."""
        params = GREEDY if sampling == "greedy" else self._pair.sampling
        prompts = self._prompts(self._options.requests[concurrency])
        before = steps_by_width(server)
        streamed, seconds = send_all(server, prompts, concurrency, params, self._options.new_tokens)
        steps = {width: n - before.get(width, 0) for width, n in steps_by_width(server).items()}
        row: dict[str, Any] = {
            "sampling": sampling,
            "concurrency": concurrency,
            **summarize(streamed, seconds)._asdict(),
            "steps_by_width": {width: n for width, n in steps.items() if n},
            "narrowed_so_far": narrowed(server),
        }
        if sampling == "greedy":
            row |= self._compared(server, prompts, streamed, concurrency)
        return row

    def _compared(
        self,
        server: Client,
        prompts: Sequence[Sequence[int]],
        streamed: Sequence[Streamed],
        concurrency: int,
    ) -> dict[str, Any]:
        """How greedy answers differ from plain decoding's at the same concurrency.

        Plain decoding's own are compared with those at its lowest concurrency.
        """
        lowest = self.answers[min(self.answers)] if self.answers else None
        self.answers[concurrency] = [one.answer.output_ids for one in streamed]
        expected = lowest if self._reference is None else self._reference.get(concurrency)
        if expected is None:
            return {}
        return differences.compare(server, prompts, expected, streamed)._asdict()

    def _prompts(self, count: int) -> list[Sequence[int]]:
        return [self._pair.prompts[i % len(self._pair.prompts)] for i in range(count)]


def state_of(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """The scheduler's part of the server's information."""
    states = info.get("internal_states") or [{}]
    state: Mapping[str, Any] = states[0]
    return state


def narrowed(server: Client) -> dict[str, int] | None:
    """Tokens drafted and verified in narrowed steps since the start; None without narrowing."""
    dflash = state_of(server.server_info()).get("dflash") or {}
    found: dict[str, int] | None = dflash.get("narrowed")
    return found


def steps_by_width(server: Client) -> dict[str, int]:
    """Verifies so far by width; empty unless our worker serves."""
    dflash = state_of(server.server_info()).get("dflash") or {}
    return dict(dflash.get("steps_by_width") or {})
