"""Ordinary requests that run while a test does something rude to their server."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from bench.harness.requests import ask_all, greedy
from bench.harness.servers import TestedServer
from tests.server.conftest import MAX_NEW_TOKENS, Reference


@contextmanager
def others_running(server: TestedServer, reference: Reference) -> Iterator[None]:
    """Keeps eight requests in flight during the block; all answers must be the reference's."""
    payloads = [greedy(prompt, MAX_NEW_TOKENS) for prompt in reference.prompts]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask_all, server, payloads)
        yield
        answers = running.result()
    assert [tuple(answer["output_ids"]) for answer in answers] == [
        answer.output_ids for answer in reference.answers
    ]
