"""The sampling features that a speculative server must answer as the verifier alone.

One request per feature and prompt, so that the test and bench/exactness/features.py send
the same. Every feature is token for token: sampled ones go by seed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from sglang.srt.sampling.custom_logit_processor import (
    CustomLogitProcessor,
    DisallowedTokensLogitsProcessor,
)

from bench.harness.requests import greedy

# Alike for all servers. Seeds need the deterministic mode; penalties have a defined meaning in
# plain decoding only without overlap, so the plain server runs without.
ARGS = (
    "--enable-deterministic-inference",
    "--enable-custom-logit-processor",
    *("--reasoning-parser", "deepseek-r1"),
    *("--tool-call-parser", "qwen25"),
)
PLAIN_ARGS = (*ARGS, "--disable-overlap-schedule")
NEW_TOKENS = 48
LONG = 96
HOT = 2.0  # the verifier is sure of itself: below, a seed hardly changes its text
# float32 sums of the same terms in another order: a block goes through other matrix shapes than a
# single token. Seen: 2e-5.
LOGPROB_TOLERANCE = 2e-4
CHAT = "/v1/chat/completions"
TOOL_CALL_ID = "id"  # random
COMPARED_META = (
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "reasoning_tokens",
    "input_token_logprobs",
    "output_token_logprobs",
    "input_top_logprobs",
    "output_top_logprobs",
    "input_token_ids_logprobs",
    "output_token_ids_logprobs",
)

Payload = dict[str, Any]


class Feature(NamedTuple):
    """A feature, and the request that uses it."""

    name: str
    payload: Callable[[str, int], Payload]  # of a prompt and its number
    path: str = "/generate"


class BanRecent(CustomLogitProcessor):
    """Forbids what was produced two tokens ago, and favours a token by the number of calls.

    Wrong whenever it is called for a position that is not committed, or sees an output that is not
    the one before it.
    """

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        """See the class."""
        for row, params in enumerate(custom_param_list or []):
            output = params["__req__"].output_ids
            if len(output) > 1:
                logits[row, output[-2]] = -math.inf
            params["calls"] = params.get("calls", 0) + 1
            logits[row, params["calls"] * 37 % logits.shape[1]] += 3.0
        return logits


def _with(**sampling: object) -> Callable[[str, int], Payload]:
    """The prompt, greedy by default, with sampling parameters."""
    return lambda prompt, number: greedy(prompt, NEW_TOKENS, **sampling)


def _penalised(**sampling: object) -> Callable[[str, int], Payload]:
    """Long enough for penalties to add up: the verifier is sure of itself."""
    return lambda prompt, number: greedy(prompt, LONG, ignore_eos=True, **sampling)


def _seeded(**sampling: object) -> Callable[[str, int], Payload]:
    return lambda prompt, number: greedy(
        prompt, NEW_TOKENS, **{"temperature": HOT, "sampling_seed": number, **sampling}
    )


def _beside(options: Mapping[str, object], **sampling: object) -> Callable[[str, int], Payload]:
    """Options beside the sampling parameters."""
    return lambda prompt, number: {**greedy(prompt, NEW_TOKENS, **sampling), **options}


def _chat(**options: object) -> Callable[[str, int], Payload]:
    return lambda prompt, number: {
        "model": "default",
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": NEW_TOKENS,
        **options,
    }


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
STRUCTURAL_TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<p>", "schema": PERSON, "end": "</p>"}],
    "triggers": ["<p>"],
}
TOOL = {"type": "function", "function": {"name": "register", "parameters": PERSON}}
ALL_LOGPROBS = {
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": 3,
    "token_ids_logprob": [5, 9],
}
PROCESSOR = {"custom_logit_processor": BanRecent.to_str()}
DISALLOW = {"custom_logit_processor": DisallowedTokensLogitsProcessor.to_str()}
# Ids that the embedded verifier uses often: spaces, digits, line ends.
COMMON = [20, 25, 31, 40]
STOPS = ["e ", "1"]

FEATURES: tuple[Feature, ...] = (
    Feature("greedy", _with()),
    Feature("temperature", _seeded()),
    Feature("temperature 1", _seeded(temperature=1.0)),
    Feature("default seed", _with(temperature=HOT)),
    Feature("top-k", _seeded(top_k=4)),
    Feature("top-p", _seeded(top_p=0.8)),
    Feature("top-k and top-p", _seeded(top_k=12, top_p=0.9)),
    Feature("repetition penalty", _penalised(repetition_penalty=2.0)),
    Feature("frequency penalty", _penalised(frequency_penalty=2.0)),
    Feature("presence penalty", _penalised(presence_penalty=2.0)),
    Feature("sampled with a penalty", _seeded(frequency_penalty=1.2, top_k=20)),
    Feature("min_new_tokens", _with(min_new_tokens=40)),
    Feature("min_new_tokens with stop tokens", _with(min_new_tokens=20, stop_token_ids=COMMON)),
    Feature("regex", _with(regex=r"(Step [0-9]: [a-z ]{3,20}\n){2}Answer: [0-9]+")),
    Feature("EBNF", _with(ebnf='root ::= item ("," item)*\nitem ::= [a-z]+ "=" [0-9]+')),
    Feature("JSON schema", _with(json_schema=json.dumps(PERSON))),
    Feature("structural tag", _with(structural_tag=json.dumps(STRUCTURAL_TAG))),
    Feature("sampled in a grammar", _seeded(regex=r"[a-z]{3,30}( [a-z]{1,9}){1,4}")),
    Feature("grammar with a penalty", _with(regex=r"[0-9a-z ]{10,60}", presence_penalty=1.5)),
    Feature(
        "response_format",
        _chat(
            response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}
        ),
        CHAT,
    ),
    Feature("tool_choice", _chat(tools=[TOOL], tool_choice="required"), CHAT),
    Feature(
        "logit_bias", _with(logit_bias={"33": 4.0, **{str(token): -100.0 for token in COMMON}})
    ),
    Feature("logprobs", _beside({"return_logprob": True})),
    Feature("input, top and chosen logprobs", _beside(ALL_LOGPROBS)),
    Feature("logprobs at temperature", _beside(ALL_LOGPROBS, temperature=HOT, sampling_seed=5)),
    Feature("logprobs with a penalty", _beside(ALL_LOGPROBS, frequency_penalty=1.8)),
    Feature("chat logprobs", _chat(logprobs=True, top_logprobs=2), CHAT),
    Feature("n", _beside({}, n=3)),
    Feature("stop string", _with(stop=STOPS)),
    Feature("no_stop_trim", _with(stop=STOPS, no_stop_trim=True)),
    Feature("stop expression", _with(stop_regex=[r"[0-9][a-z ]", r"\n"])),
    Feature("stop token", _with(stop_token_ids=COMMON)),
    Feature("ignore_eos", _penalised()),
    Feature("max_new_tokens", lambda prompt, number: greedy(prompt, 1 + number)),
    Feature("special tokens in the text", _with(skip_special_tokens=False)),
    Feature("custom logit processor", _beside(PROCESSOR, custom_params={})),
    Feature("processor without state", _beside(DISALLOW, custom_params={"token_ids": COMMON})),
    Feature("reasoning tokens", _beside({"require_reasoning": True}, stop=STOPS)),
    Feature(
        "text completion",
        lambda prompt, number: {
            "model": "default",
            "prompt": prompt,
            "temperature": 0,
            "max_tokens": NEW_TOKENS,
            "echo": True,
            "stop": STOPS,
        },
        "/v1/completions",
    ),
)


def same(left: Any, right: Any) -> bool:
    """Whether two answers are equal, log-probabilities up to rounding."""
    return _alike(_answer(left), _answer(right))


def _answer(answer: Any) -> Any:
    """An answer without the server's statistics; an error as it is."""
    if isinstance(answer, list):
        return [_answer(one) for one in answer]
    if isinstance(answer, tuple):
        return answer
    if "meta_info" in answer:
        meta = {name: answer["meta_info"].get(name) for name in COMPARED_META}
        return {"text": answer["text"], "output_ids": answer["output_ids"], **meta}
    return {"choices": answer["choices"], "usage": answer["usage"]}


def _alike(left: Any, right: Any) -> bool:
    if isinstance(left, float) and isinstance(right, float):
        return abs(left - right) <= LOGPROB_TOLERANCE
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(
            key == TOOL_CALL_ID or _alike(value, right[key]) for key, value in left.items()
        )
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_alike, left, right))
    return bool(left == right)
