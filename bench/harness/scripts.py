"""The client's side of server_side/: variables for servers that load it, names for requests."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.harness.requests import greedy, send_all
from launch.client import Answer, Client

PLUGIN_FOLDER = Path(__file__).parent / "server_side"
# Under overlap a request is drafted for once more after its last block.
SPARE_TOKENS = 64
LEAK = "leak/negative-control"  # id of a request that makes the server lose a KV slot a step


class Continuation(NamedTuple):
    """A prompt and the verifier's continuation, past its end-of-text token if need be."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]


def continuations(
    plain: Client, prompts: Sequence[str], max_new_tokens: int
) -> tuple[Continuation, ...]:
    """Plain decoding's continuation of each prompt, past its end-of-text token."""
    payloads = [
        {
            **greedy(prompt, max_new_tokens + SPARE_TOKENS, ignore_eos=True),
            "return_prompt_token_ids": True,
        }
        for prompt in prompts
    ]
    return tuple(
        Continuation(tuple(answer["prompt_token_ids"]), tuple(answer["output_ids"]))
        for answer in send_all(plain, payloads)
    )


def environment(
    folder: Path, continuations: Iterable[Continuation], *others: str
) -> dict[str, str]:
    """Writes the oracle's table and the plugin's entry point to `folder`.

    Returns:
        The variables that make a server load scripted_drafts, and `others` of server_side/ too.
    """
    plugin = plugin_environment(folder, "scripted_drafts", *others)
    table = folder / "continuations.json"
    table.write_text(json.dumps(list(continuations)))
    return {**plugin, "DFLASH_TEST_CONTINUATIONS": str(table)}


def plugin_environment(folder: Path, *modules: str) -> dict[str, str]:
    """Writes the entry points of plugins in server_side/ to `folder`; returns the variables."""
    distribution = folder / "dflash_test_scripts-0.dist-info"
    distribution.mkdir(parents=True)
    (distribution / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: dflash-test-scripts\nVersion: 0\n"
    )
    entries = [f"dflash_test_{module} = {module}:register" for module in modules]
    (distribution / "entry_points.txt").write_text(
        "\n".join(["[sglang.srt.plugins]", *entries, ""])
    )
    path = [str(folder), str(PLUGIN_FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path)}


def oracle(k: int, name: object) -> str:
    """Id of a request whose drafts are right for exactly `k` tokens."""
    return f"oracle-{k}/{name}"


def holes(seed: int, name: object) -> str:
    """Id of a request whose drafts are wrong at random places."""
    return f"holes-{seed}/{name}"


def wrong(name: object) -> str:
    """Id of a request whose drafts are all wrong."""
    return f"wrong/{name}"


def random_width(name: object) -> str:
    """Id of a request that has another width each step: see server_side/scripted_widths.py."""
    return f"{name}~width"


def forced_width(width: int, name: object) -> str:
    """Id of a request whose steps have this width."""
    return f"{name}~width-{width}"


def random_bound(name: object) -> str:
    """Id of a request of whose blocks another number of tokens is verified each step."""
    return f"{name}~bound"


def forced_bound(tokens: int, name: object) -> str:
    """Id of a request of whose blocks this number of tokens is verified."""
    return f"{name}~bound-{tokens}"


def wrong_rule(mistake: str) -> dict[str, str]:
    """`custom_params` of a request that is accepted wrongly: see server_side/wrong_rules.py."""
    return {"wrong_rule": mistake}


def correct_drafts(answer: Answer) -> Sequence[int]:
    """Verify steps of a request by the number of accepted drafts: index k holds those with k."""
    histogram: Sequence[int] = answer.meta.get("spec_correct_drafts_histogram", ())
    return histogram
