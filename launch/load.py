"""A closed-loop load for a server, and its results: tokens/s, tau, identity with a reference."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from launch.client import Answer, Client

Prompt = TypeVar("Prompt")
Got = TypeVar("Got")


class Load(NamedTuple):
    """One pass over the prompts at one concurrency."""

    answers: tuple[Answer, ...]  # in the order of the prompts
    seconds: float  # from the first request to the last answer

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens of all requests per second of wall time."""
        return sum(answer.completion_tokens for answer in self.answers) / self.seconds


class Difference(NamedTuple):
    """The first place where an answer leaves its reference."""

    prompt: int  # index of the prompt
    position: int  # of the first differing token
    expected: tuple[int, ...]  # token ids of the reference
    got: tuple[int, ...]


def run(
    client: Client,
    prompts: Sequence[str],
    concurrency: int,
    max_new_tokens: int,
    on_answer: Callable[[], None] | None = None,
) -> Load:
    """Sends every prompt once, greedily, `concurrency` requests in flight at any time.

    The prefix cache is emptied first, so that each pass does the same work.

    Raises:
        RequestError: a request was refused; the pass ends.
        OSError: the server went away.
    """
    client.flush()

    def send(prompt: str) -> Answer:
        answer = client.generate(prompt, max_new_tokens=max_new_tokens)
        if on_answer is not None:
            on_answer()
        return answer

    answers, seconds = closed_loop(send, prompts, concurrency)
    return Load(tuple(answers), seconds)


def closed_loop(
    send: Callable[[Prompt], Got], prompts: Sequence[Prompt], concurrency: int
) -> tuple[list[Got], float]:
    """Sends every prompt once, `concurrency` in flight at any time.

    Returns:
        What was sent back, in the order of the prompts, and the seconds it took.
    """
    stop = threading.Event()

    def send_unless_stopped(prompt: Prompt) -> Got | None:
        return None if stop.is_set() else send(prompt)

    begin = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        try:
            sent = list(pool.map(send_unless_stopped, prompts))
        except BaseException:
            # Also Ctrl-C: do not send what is still queued.
            stop.set()
            raise
    seconds = time.perf_counter() - begin
    return [one for one in sent if one is not None], seconds


def tau(answers: Iterable[Answer]) -> float:
    """Mean committed tokens per verify: (completion tokens - 1) summed / verifies summed.

    The first token of an answer comes from prefill and is not counted; accepted drafts behind a
    stop token are not counted either, since they are not returned. Without speculation every
    decoding step commits one token: 1.0.
    """
    listed = tuple(answers)
    verifies = sum(answer.verify_count for answer in listed)
    if verifies == 0:
        return 1.0
    committed = sum(answer.completion_tokens - 1 for answer in listed)
    return committed / verifies


def first_difference(expected: Sequence[Answer], got: Sequence[Answer]) -> Difference | None:
    """Compares the token ids of two passes over the same prompts; None when all are equal."""
    for prompt, (left, right) in enumerate(zip(expected, got, strict=True)):
        if left.output_ids != right.output_ids:
            pairs = zip(left.output_ids, right.output_ids, strict=False)
            shorter = min(len(left.output_ids), len(right.output_ids))
            position = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
            return Difference(prompt, position, left.output_ids, right.output_ids)
    return None
