"""Plain decoding's answers to held-out prompts, which every other way to serve must give too."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

from tokenizers import Tokenizer

from bench.harness.requests import greedy, send_all
from bench.harness.servers import TestedServer
from dflash_sglang import zoo
from launch.client import Answer

MAX_NEW_TOKENS = 96


class Reference(NamedTuple):
    """Prompts and the verifier's greedy answers."""

    prompts: list[str]
    answers: tuple[Answer, ...]

    @property
    def output_ids(self) -> list[tuple[int, ...]]:
        """Token ids of the answers."""
        return [answer.output_ids for answer in self.answers]


def token_ids(text: str) -> list[int]:
    """A text by the tokenizer of the embedded MoE pair."""
    tokenizer = Tokenizer.from_file(str(zoo.path("moe").verifier / "tokenizer.json"))
    return list(tokenizer.encode(text).ids)


@contextmanager
def others_running(server: TestedServer, reference: Reference) -> Iterator[None]:
    """Keeps eight requests in flight during the block; all answers must be the reference's."""
    payloads = [greedy(prompt, MAX_NEW_TOKENS) for prompt in reference.prompts]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(send_all, server, payloads)
        yield
        answers = running.result()
    assert [tuple(answer["output_ids"]) for answer in answers] == reference.output_ids
