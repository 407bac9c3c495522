"""Greedy answers beside plain decoding's: how many are equal, and how close the others were.

In bfloat16 a block goes through other matrix shapes than a single token, and where two tokens are
nearly as likely the other one may win. Behind such a place texts differ for good, so only the first
difference says anything: the gap between the log-probabilities of the two tokens there. Plain
decoding at another concurrency is compared as well: it shows what batch shapes alone do.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from bench.gpu.serve.streams import Streamed
from launch.client import Client, RequestError
from launch.load import Difference, first_difference

PROBED = 8  # differing answers of a load of which the gap is asked for
NEAR_TIE = 0.1  # of log-probability; larger gaps deserve a look


class Comparison(NamedTuple):
    """A load's greedy answers beside plain decoding's."""

    equal: int
    compared: int
    first: dict[str, Any] | None  # the first difference in the order of prompts
    largest_gap: float | None  # among those probed


def compare(
    client: Client,
    prompts: Sequence[Sequence[int]],
    reference: Sequence[Sequence[int]],
    streamed: Sequence[Streamed],
) -> Comparison:
    """Compares as many answers as the reference has.

    Args:
        client: the server that answered; it is asked for the gaps.
        prompts: token ids.
        reference: output ids of plain decoding, for the first prompts.
        streamed: the answers, in the order of the prompts.
    """
    compared = min(len(reference), len(streamed))
    found = list(differing(reference[:compared], streamed[:compared]))
    probed = [
        {
            "prompt": one.prompt,
            "token": one.position,
            "gap": gap_of(client, prompts[one.prompt], one),
        }
        for one in found[:PROBED]
    ]
    gaps = [one["gap"] for one in probed if one["gap"] is not None]
    return Comparison(
        equal=compared - len(found),
        compared=compared,
        first=probed[0] if probed else None,
        largest_gap=max(gaps, default=None),
    )


def differing(
    reference: Sequence[Sequence[int]], streamed: Sequence[Streamed]
) -> Iterator[Difference]:
    """The first difference of every answer that has one."""
    for prompt, (expected, one) in enumerate(zip(reference, streamed, strict=True)):
        answer = one.answer
        found = first_difference([answer._replace(output_ids=tuple(expected))], [answer])
        if found is not None:
            yield found._replace(prompt=prompt)


def gap_of(client: Client, prompt: Sequence[int], at: Difference) -> float | None:
    """Log-probability of plain decoding's token less that of the other, by a prefill of the server.

    None where one answer ended, or where the server does not give log-probabilities.
    """
    place = at.position
    if place >= min(len(at.expected), len(at.got)):
        return None
    pair = [at.expected[place], at.got[place]]
    payload = {
        "input_ids": [*prompt, *at.expected[:place]],
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_logprob": True,
        "token_ids_logprob": pair,
    }
    with contextlib.suppress(RequestError, KeyError, TypeError, ValueError):
        (listed,) = client.post("/generate", payload)["meta_info"]["output_token_ids_logprobs"]
        by_id = {int(token): float(value) for value, token, *_ in listed}
        gap = by_id[pair[0]] - by_id[pair[1]]
        return round(gap, 4) if math.isfinite(gap) else None
    return None
