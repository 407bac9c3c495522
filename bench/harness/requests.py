"""Sending requests: one, many at once, streamed; and the parts in which two answers must agree."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from typing import Any

from launch.client import Client, RequestError


def greedy(
    prompt: str | Sequence[int], max_new_tokens: int | None = 96, **sampling: object
) -> dict[str, Any]:
    """Body of a greedy `/generate` request for a prompt given as text or token ids.

    Without `max_new_tokens` the answer goes on to the end of the context.
    """
    params = {"temperature": 0, "max_new_tokens": max_new_tokens, **sampling}
    source = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
    return {**source, "sampling_params": params}


def send(client: Client, payload: object, path: str = "/generate") -> Any:
    """The JSON answer; an error status becomes (status, body), for comparison."""
    try:
        return client.post(path, payload)
    except RequestError as error:
        return error.status, error.body


def send_all(
    client: Client, payloads: Sequence[object], concurrency: int = 8, path: str = "/generate"
) -> list[Any]:
    """The answers in the order of the payloads, `concurrency` requests in flight."""
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda payload: send(client, payload, path), payloads))


def stream(client: Client, payload: Mapping[str, Any], path: str = "/generate") -> list[Any]:
    """The events of a streamed answer."""
    with client.open(path, {**payload, "stream": True}) as response:
        return list(events(response))


def events(response: HTTPResponse) -> Iterator[Any]:
    """Server-sent events up to the final `[DONE]`, which must come."""
    for line in response:
        if not line.startswith(b"data: "):
            continue
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            return
        yield json.loads(data)
    raise AssertionError("the stream ended without [DONE]")


def essence(answer: Any) -> Any:
    """What two servers must agree on in a `/generate` answer: all but ids, times, statistics."""
    if isinstance(answer, list):
        return [essence(one) for one in answer]
    if isinstance(answer, tuple):
        return answer
    meta = answer["meta_info"]
    return {
        "text": answer["text"],
        "output_ids": answer["output_ids"],
        **{name: meta[name] for name in ("finish_reason", "prompt_tokens", "completion_tokens")},
    }


def openai_essence(answer: Any) -> Any:
    """The same for an answer of the OpenAI routes; only a reasoning parser counts its tokens."""
    if isinstance(answer, tuple):
        return answer
    reasoning = ("reasoning_tokens", "completion_tokens_details")
    usage = {name: n for name, n in answer["usage"].items() if name not in reasoning}
    return {"choices": answer["choices"], "usage": usage}
