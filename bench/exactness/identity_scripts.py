"""Sweeps with scripted drafts: every accept length side by side, or none accepted."""

from collections.abc import Sequence
from typing import NamedTuple

from bench.exactness.identity_rows import MAX_NEW_TOKENS, sweep
from bench.harness import scripts
from bench.harness.configurations import Configuration, Drafter
from bench.harness.requests import greedy
from launch import load
from launch.client import Client


class Script(NamedTuple):
    """The scripted drafts of one request."""

    rid: str
    accepted: int | None  # drafts in every verify; None: it varies


class ScriptError(RuntimeError):
    """The drafts were not those of the scripts: the comparison proves nothing."""


def run(
    server: Client,
    configuration: Configuration,
    continuations: Sequence[scripts.Continuation],
    concurrency: int,
) -> load.Load:
    """One sweep over the prompts of `continuations`.

    Raises:
        ScriptError: a verify accepted more or fewer drafts than the script has right.
    """
    chosen = [script(configuration, place, concurrency) for place in range(len(continuations))]
    payloads = [
        {**greedy(one.prompt_ids, MAX_NEW_TOKENS), "rid": script.rid}
        for one, script in zip(continuations, chosen, strict=True)
    ]
    done = sweep(server, payloads, concurrency)
    for (rid, accepted), answer in zip(chosen, done.answers, strict=True):
        steps = list(scripts.correct_drafts(answer))
        right = accepted is None or steps == [0] * accepted + [answer.verify_count]
        if answer.verify_count and not right:
            raise ScriptError(f"{rid}: verifies by accepted drafts are {steps}")
    return done


def script(configuration: Configuration, place: int, concurrency: int) -> Script:
    """The script of the prompt at `place`: neighbours differ, and so do concurrencies."""
    name = f"{concurrency}.{place}"
    if configuration.drafter is Drafter.ORACLE:
        right = (place + concurrency) % configuration.block_size
        return Script(scripts.oracle(right, name), right)
    if place % 2:
        return Script(scripts.holes(place, name), None)
    return Script(scripts.wrong(name), 0)
