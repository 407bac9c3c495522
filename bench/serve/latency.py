"""Latency of every request of a mixed load: no request may starve under speculation."""

import statistics
from typing import Any

from bench.harness.requests import greedy, send_all
from launch.comparison import choose_prompts
from launch.serving import Server

CONCURRENCY = 32
REQUESTS = 64
NEW_TOKENS = 192


def measure(plain: Server, ours: Server, rounds: int) -> dict[str, Any]:
    """The largest ratio of a request's latency to its latency with plain decoding.

    Both servers get the same requests in the same order; a latency is the median of the rounds.
    """
    texts = [prompt.text for prompt in choose_prompts("moe", REQUESTS)]
    payloads = [greedy(text, NEW_TOKENS) for text in texts]
    seconds: dict[str, list[float]] = {}
    for name, server in (("plain", plain), ("dflash", ours)):
        found = []
        for _ in range(rounds):
            server.flush()
            answers = send_all(server, payloads, CONCURRENCY)
            found.append([answer["meta_info"]["e2e_latency"] for answer in answers])
        seconds[name] = [statistics.median(column) for column in zip(*found, strict=True)]
    ratios = [a / b for a, b in zip(seconds["dflash"], seconds["plain"], strict=True)]
    print(
        f"latency over plain decoding's, {REQUESTS} requests at concurrency {CONCURRENCY}: "
        f"median {statistics.median(ratios):.2f}, largest {max(ratios):.2f}"
    )
    return {
        "requests": REQUESTS,
        "concurrency": CONCURRENCY,
        "largest_ratio": round(max(ratios), 3),
        "median_ratio": round(statistics.median(ratios), 3),
    }
