"""A closed-loop load of streamed requests: when each token came."""

import itertools
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from launch.client import Answer, Client
from launch.load import closed_loop, tau

READ_TOGETHER = 1e-4  # seconds; no server takes a step in so little


class StreamError(RuntimeError):
    """A streamed answer ended with an error, or without its end."""


class Streamed(NamedTuple):
    """One answer, and when its parts came."""

    answer: Answer
    sent: float  # seconds
    arrivals: tuple[tuple[float, int], ...]  # seconds, and tokens so far; ascending in both

    @property
    def to_first(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0][0] - self.sent

    def gaps(self) -> Iterator[tuple[float, int]]:
        """Seconds from one part to the next, and how many tokens the next one brought.

        Parts that were read together count as one: the client was late, not the server that fast.
        """
        parts: list[tuple[float, int]] = []
        for at, tokens in self.arrivals:
            if parts and at - parts[-1][0] < READ_TOGETHER:
                parts[-1] = parts[-1][0], tokens
            else:
                parts.append((at, tokens))
        for (before, so_far), (at, tokens) in itertools.pairwise(parts):
            yield at - before, tokens - so_far


class Numbers(NamedTuple):
    """What a load says."""

    requests: int
    tokens: int
    tokens_per_s: float
    tau: float  # mean committed tokens per verify; 1 for plain decoding
    # Between tokens: a part's gap is shared out evenly over its tokens. None: answers of one part.
    p50_ms: float | None
    p99_ms: float | None
    longest_gap_ms: float | None  # from one part to the next of the same answer, not shared out
    first_token_ms: float  # median
    longest_first_token_ms: float


def send_all(
    client: Client,
    prompts: Sequence[Sequence[int]],
    concurrency: int,
    sampling: Mapping[str, float],
    new_tokens: int,
) -> tuple[list[Streamed], float]:
    """Streams every prompt once, `concurrency` in flight, and returns the answers and the seconds.

    The prefix cache is emptied first, so that every configuration does the same work.

    Raises:
        StreamError: an answer broke off.
        RequestError: a request was refused.
        OSError: the server went away.
    """
    client.flush()
    params = {**sampling, "max_new_tokens": new_tokens}

    def send(prompt: Sequence[int]) -> Streamed:
        return stream(client, {"input_ids": list(prompt), "sampling_params": params})

    return closed_loop(send, prompts, concurrency)


def stream(client: Client, payload: Mapping[str, Any]) -> Streamed:
    """One streamed answer; events are decoded after the last has come, not between two."""
    sent = time.perf_counter()
    lines: list[tuple[float, bytes]] = []
    with client.open("/generate", {**payload, "stream": True}) as response:
        for line in response:
            if line.startswith(b"data: "):
                lines.append((time.perf_counter(), line.removeprefix(b"data: ").strip()))
    if not lines or lines[-1][1] != b"[DONE]":
        raise StreamError("an answer ended without [DONE]; the end of the server's log says why")
    events = [(at, json.loads(data)) for at, data in lines[:-1]]
    for _, event in events:
        if "error" in event:
            raise StreamError(f"the server answered {event['error']}")
    # SGLang's parts hold the answer so far, the last one all of it.
    answer = Answer.parse(events[-1][1])
    arrivals: list[tuple[float, int]] = []
    for at, event in events:
        tokens = int(event["meta_info"]["completion_tokens"])
        if tokens > (arrivals[-1][1] if arrivals else 0):
            arrivals.append((at, tokens))
    return Streamed(answer, sent, tuple(arrivals))


def summarize(streamed: Sequence[Streamed], seconds: float) -> Numbers:
    """The numbers of a load."""
    gaps = [gap for one in streamed for gap in one.gaps()]
    shares = sorted(gap / tokens for gap, tokens in gaps for _ in range(tokens))
    first = [one.to_first for one in streamed]
    tokens = sum(one.answer.completion_tokens for one in streamed)
    return Numbers(
        requests=len(streamed),
        tokens=tokens,
        tokens_per_s=round(tokens / seconds, 1),
        tau=round(tau(one.answer for one in streamed), 3),
        p50_ms=_ms(quantile(shares, 0.5)),
        p99_ms=_ms(quantile(shares, 0.99)),
        longest_gap_ms=_ms(max((gap for gap, _ in gaps), default=None)),
        first_token_ms=round(1000 * statistics.median(first), 3),
        longest_first_token_ms=round(1000 * max(first), 3),
    )


def quantile(ascending: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of the values do not exceed; None of none."""
    if not ascending:
        return None
    return ascending[max(0, -(-len(ascending) * round(share * 100) // 100) - 1)]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)
