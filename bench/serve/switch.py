"""A stream whose middle third the drafter cannot predict: how fast the width follows."""

import random
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from bench.harness.requests import greedy, send_all
from launch.comparison import choose_prompts
from launch.serving import Server

CONCURRENCY = 8
GOOD_TOKENS = 192  # at most: these answers end with a stop token
BAD = 96  # prompts of random tokens
# Tokens of their answers. At width 1, requests of equal length would end together and be
# prefilled together, which would favour plain decoding and does not happen in real traffic.
BAD_TOKENS = (48, 144)
POLL_S = 0.1
# A width is dominant once this share of the steps between two samples had it.
DOMINANT = 0.6


def thirds(seed: int = 0) -> list[list[dict[str, Any]]]:
    """Requests: held-out prompts, random token ids, held-out prompts."""
    generator = random.Random(seed)
    texts = [prompt.text for prompt in choose_prompts("moe")]
    bad = [
        greedy(generator.choices(range(16, 1024), k=24), tokens, ignore_eos=True)
        for tokens in (generator.randint(*BAD_TOKENS) for _ in range(BAD))
    ]
    good = [greedy(text, GOOD_TOKENS) for text in texts]
    half = len(good) // 2
    return [good[:half], bad, good[half:]]


class WidthWatch(threading.Thread):
    """Samples the widths of a server's steps."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._done = threading.Event()
        self.samples: list[tuple[float, dict[int, int]]] = []  # time, steps by width so far

    def run(self) -> None:
        """Sample until `stop`."""
        while not self._done.wait(POLL_S):
            state = self._server.server_info()["internal_states"][0]["dflash"]
            steps = {int(width): count for width, count in state["steps_by_width"].items()}
            self.samples.append((time.perf_counter(), steps))

    def stop(self) -> None:
        """End the thread."""
        self._done.set()
        self.join()

    def settled_after(self, begin: float, wide: bool) -> float | None:
        """Seconds until most steps are wide (or narrow: at most 2 tokens); None if never."""
        for (_, before), (when, after) in zip(self.samples, self.samples[1:], strict=False):
            steps = {width: after[width] - before[width] for width in after}
            total = sum(steps.values())
            if when < begin or total == 0:
                continue
            narrow = sum(count for width, count in steps.items() if width <= 2)
            if (total - narrow if wide else narrow) > DOMINANT * total:
                return max(0.0, when - begin)
        return None


def measure(servers: Mapping[str, Server], adaptive: str, rounds: int) -> dict[str, Any]:
    """Tokens/s of every third, for every way to choose the width.

    Args:
        servers: by width, `adaptive` among them.
        adaptive: the key of the server that adapts its width.
        rounds: how often everything is measured.
    """
    parts = thirds()
    rates: dict[str, list[list[float]]] = {name: [] for name in servers}
    switches: list[list[float | None]] = []
    for _ in range(rounds):
        for name, server in servers.items():
            server.flush()
            rates[name].append([_rate(server, part) for part in parts])
        switches.append(_switches(servers[adaptive], parts))
    medians = {
        name: [round(statistics.median(column), 1) for column in zip(*found, strict=True)]
        for name, found in rates.items()
    }
    best = [max(medians[name][i] for name in servers if name != adaptive) for i in range(3)]
    share = [round(medians[adaptive][i] / best[i], 3) for i in range(3)]
    print(f"stream, tokens/s of its thirds by width: {medians}; adaptive / best fixed: {share}")
    print(f"seconds until the width followed, to narrow and back, in each round: {switches}")
    return {
        "concurrency": CONCURRENCY,
        "tokens_per_s": medians,
        "adaptive_over_best": share,
        "switch_s": switches,
    }


def _rate(server: Server, part: Sequence[object]) -> float:
    begin = time.perf_counter()
    answers = send_all(server, part, CONCURRENCY)
    seconds = time.perf_counter() - begin
    return float(sum(len(answer["output_ids"]) for answer in answers) / seconds)


def _switches(server: Server, parts: Sequence[Sequence[object]]) -> list[float | None]:
    """Seconds until the width has followed each of the two changes."""
    watch = WidthWatch(server)
    watch.start()
    begins = []
    for part in parts:
        begins.append(time.perf_counter())
        send_all(server, part, CONCURRENCY)
    watch.stop()
    return [
        watch.settled_after(begins[1], wide=False),
        watch.settled_after(begins[2], wide=True),
    ]
