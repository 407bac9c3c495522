"""What only recurrent layers can get wrong: long answers, and starts from a cached state.

Plain decoding and ours are served with the same flags, so that they keep states for the same
prefixes.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from bench.exactness.identity_rows import MAX_NEW_TOKENS, Row, compare, show, sweep
from bench.harness.configurations import Configuration
from bench.harness.requests import greedy, send_all
from bench.harness.servers import TestedServer, serve
from dflash_sglang import zoo
from launch import load
from launch.client import Answer, Client

LONG_TOKENS = 2000  # with its prompt just within the context of the embedded pair
LONG_ANSWERS = 2
LONG_CONCURRENCY = 8
BESIDE = 100  # ordinary answers, in the batches of the long ones
CONVERSATIONS = 40
TURNS = ("first", "again", "continued")


class Repeat(NamedTuple):
    """The same turn of all conversations, one conversation at a time."""

    configuration: str
    turn: str
    conversations: int
    identical: int
    cached_tokens: int  # of prompts, found in the prefix cache
    cached_tokens_plain: int  # the same with plain decoding
    fewer: int  # conversations that found fewer than with plain decoding


class Work(NamedTuple):
    """Requests that plain decoding and our worker both get."""

    long: list[dict[str, Any]]  # answers across many boundaries of kept states
    beside: list[dict[str, Any]]  # ordinary ones, in flight with the long ones
    conversations: list[list[dict[str, Any]]]  # by conversation, its turns


class Answers(NamedTuple):
    """The answers to it."""

    alone: load.Load  # the first long one
    beside: load.Load  # the long ones and then the others
    turns: list[list[Answer]]  # by conversation


def measure(
    configuration: Configuration, folder: Path, prompts: Sequence[str]
) -> tuple[list[Row], list[Repeat]]:
    """Serve a configuration with and without speculation; every answer must be the same."""
    verifier = zoo.path(configuration.model).verifier
    with TestedServer(verifier, args=configuration.plain_args(), log_dir=folder / "plain") as plain:
        work = plan(plain, prompts)
        expected = answer(plain, work)
    with serve(configuration, folder / "ours") as ours:
        got = answer(ours, work)
        ours.check_idle()
    name = f"{configuration.name}, {LONG_TOKENS} tokens"
    rows = [
        compare(f"{name} alone", 1, expected.alone.answers, got.alone),
        compare(f"{name} beside others", LONG_CONCURRENCY, expected.beside.answers, got.beside),
    ]
    repeats = [
        compare_turn(configuration.name, turn, expected.turns, got.turns)
        for turn in range(len(TURNS))
    ]
    for row in rows:
        show(row)
    for repeat in repeats:
        show_repeat(repeat)
    return rows, repeats


def plan(plain: Client, prompts: Sequence[str]) -> Work:
    """Each conversation sends a prompt twice, then its answer and the next prompt."""
    payloads = [
        {**greedy(prompt, MAX_NEW_TOKENS), "return_prompt_token_ids": True}
        for prompt in prompts[:BESIDE]
    ]
    answers = send_all(plain, payloads)
    ids = [answer["prompt_token_ids"] for answer in answers]
    short = sorted(ids, key=len)[:LONG_ANSWERS]
    conversations = []
    for place in range(min(CONVERSATIONS, len(ids) - 1)):
        further = ids[place] + answers[place]["output_ids"] + ids[place + 1]
        turns = (ids[place], ids[place], further)
        conversations.append([greedy(turn, MAX_NEW_TOKENS) for turn in turns])
    return Work(
        long=[greedy(prompt, LONG_TOKENS, ignore_eos=True) for prompt in short],
        beside=[greedy(prompt, MAX_NEW_TOKENS) for prompt in ids],
        conversations=conversations,
    )


def answer(server: Client, work: Work) -> Answers:
    """Everything, with an empty prefix cache before each part."""
    alone = sweep(server, work.long[:1], 1)
    beside = sweep(server, [*work.long, *work.beside], LONG_CONCURRENCY)
    server.flush()
    turns = [
        [Answer.parse(one) for one in send_all(server, conversation, concurrency=1)]
        for conversation in work.conversations
    ]
    return Answers(alone, beside, turns)


def compare_turn(
    name: str, turn: int, expected: Sequence[Sequence[Answer]], got: Sequence[Sequence[Answer]]
) -> Repeat:
    """One turn of all conversations."""
    pairs = [(plain[turn], ours[turn]) for plain, ours in zip(expected, got, strict=True)]
    cached = [tuple(int(one.meta["cached_tokens"]) for one in pair) for pair in pairs]
    return Repeat(
        configuration=name,
        turn=TURNS[turn],
        conversations=len(pairs),
        identical=sum(plain.output_ids == ours.output_ids for plain, ours in pairs),
        cached_tokens=sum(ours for _, ours in cached),
        cached_tokens_plain=sum(plain for plain, _ in cached),
        fewer=sum(ours < plain for plain, ours in cached),
    )


def show_repeat(repeat: Repeat) -> None:
    """Print it as soon as it is known."""
    tqdm.write(
        f"{repeat.configuration:<45} {repeat.turn}: {repeat.identical}/{repeat.conversations} "
        f"identical, {repeat.cached_tokens} tokens cached, {repeat.cached_tokens_plain} with plain "
        f"decoding, fewer {repeat.fewer} times"
    )
