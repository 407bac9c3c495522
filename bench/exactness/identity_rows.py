"""One sweep over the prompts against its reference: send, compare, show."""

import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from tqdm import tqdm

from bench.harness.requests import send_all
from launch import load
from launch.client import Answer, Client

MAX_NEW_TOKENS = 192


class Row(NamedTuple):
    """One configuration at one concurrency."""

    configuration: str
    concurrency: int
    prompts: int
    identical: int
    tokens: int
    verifies: int
    tau: float
    retractions: int
    seconds: float


def sweep(server: Client, payloads: Sequence[object], concurrency: int) -> load.Load:
    """As `load.run`, with bodies of `/generate` instead of prompts."""
    server.flush()
    begin = time.perf_counter()
    answers = send_all(server, payloads, concurrency)
    return load.Load(tuple(map(Answer.parse, answers)), time.perf_counter() - begin)


def compare(name: str, concurrency: int, expected: Sequence[Answer], done: load.Load) -> Row:
    """One row; the first difference goes to standard error."""
    same = sum(a.output_ids == b.output_ids for a, b in zip(expected, done.answers, strict=True))
    difference = load.first_difference(expected, done.answers)
    if difference is not None:
        tqdm.write(
            f"{name} at concurrency {concurrency}: the answer to prompt {difference.prompt} "
            f"differs at token {difference.position}: {difference.expected} became "
            f"{difference.got}",
            file=sys.stderr,
        )
    return Row(
        configuration=name,
        concurrency=concurrency,
        prompts=len(expected),
        identical=same,
        tokens=sum(answer.completion_tokens for answer in done.answers),
        verifies=sum(answer.verify_count for answer in done.answers),
        tau=round(load.tau(done.answers), 3),
        retractions=sum(answer.meta["num_retractions"] for answer in done.answers),
        seconds=round(done.seconds, 1),
    )


def show(row: Row) -> None:
    """Print a row as soon as it is known."""
    tqdm.write(
        f"{row.configuration:<45} c={row.concurrency:<3} {row.identical}/{row.prompts} identical, "
        f"tau {row.tau:.2f}, {row.verifies} verifies, {row.retractions} retractions, "
        f"{row.seconds:.0f} s"
    )
