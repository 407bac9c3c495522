"""A plugin for tests: scripts what the drafter proposes, in the scheduler of a real server.

The id of a request names its script, so one batch can mix them:

    oracle-<k>/...    the verifier's own continuation, wrong at draft k + 1, right again behind it
    holes-<seed>/...  the continuation, wrong at random places
    wrong/...         wrong everywhere
    leak/...          as wrong, and takes a KV slot that is never released (the negative control)

Requests with other ids keep what the drafter proposes. Drafts behind a wrong one are right on
purpose: an accept rule that counts matches instead of the leading run of them must not pass.
"""

from __future__ import annotations

import functools
import json
import os
import random
from pathlib import Path
from typing import Any

CONTINUATIONS = "DFLASH_TEST_CONTINUATIONS"  # file of [[prompt ids, continuation ids], ...]


def register() -> None:
    """Entry point: waits for our worker to be chosen, which happens in the scheduler only."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("dflash_sglang.hooks.apply", hook_drafter, HookType.BEFORE)


def hook_drafter(*args: Any, **options: Any) -> None:
    """Replace the drafts of our worker by scripted ones."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "dflash_sglang.step.draft.drafter.Drafter.propose", propose, HookType.AROUND
    )
    HookRegistry.apply_hooks()


def propose(original: Any, drafter: Any, batch: Any, *rest: Any, **options: Any) -> Any:
    """AROUND hook: drafts as usual, then overwrites the rows of scripted requests."""
    draft = original(drafter, batch, *rest, **options)
    draft_ids = draft.ids.clone()  # an inference tensor is read-only here
    for row, req in enumerate(batch.reqs):
        script = req.rid.partition("/")[0]
        kind, _, argument = script.partition("-")
        if kind not in ("oracle", "holes", "wrong", "leak"):
            continue
        sequence = req.origin_input_ids, continuations()[tuple(req.origin_input_ids)]
        # Of the host's view only the lengths of this step count: its output lags under overlap.
        position = int(batch.seq_lens[row])  # of the anchor
        width = draft_ids.shape[1] - 1
        right = following(*sequence, position, int(draft_ids[row, 0]), width)
        wrong = wrong_places(kind, argument, width, position)
        draft_ids[row, 1:] = draft_ids.new_tensor(
            [token ^ 1 if place in wrong else token for place, token in enumerate(right)]
        )
        if kind == "leak":
            batch.token_to_kv_pool_allocator.alloc(batch.token_to_kv_pool_allocator.page_size)
    return draft._replace(ids=draft_ids)


def following(
    prompt: Any, continuation: list[int], position: int, anchor: int, width: int
) -> list[int]:
    """The verifier's `width` tokens after the anchor.

    Raises:
        RuntimeError: the worker's anchor is not the verifier's token; the server goes down.
    """
    at = position - len(prompt)
    if continuation[at] != anchor:
        raise RuntimeError(
            f"scripted drafts: the anchor at position {position} is {anchor}, "
            f"the verifier's token is {continuation[at]}"
        )
    return continuation[at + 1 : at + 1 + width]


def wrong_places(kind: str, argument: str, width: int, position: int) -> set[int]:
    """Which drafts of a block to spoil, counted from 0."""
    if kind == "oracle":
        return {int(argument)}  # past the block for k = width: nothing is spoilt
    if kind == "holes":
        chance = random.Random(f"{argument}:{position}")
        return {place for place in range(width) if chance.random() < 0.25}
    return set(range(width))


@functools.cache
def continuations() -> dict[tuple[int, ...], list[int]]:
    """Plain decoding's continuation of each prompt, by the prompt's ids."""
    pairs = json.loads(Path(os.environ[CONTINUATIONS]).read_text())
    return {tuple(prompt): continuation for prompt, continuation in pairs}
