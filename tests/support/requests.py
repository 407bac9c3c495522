"""Stand-ins for SGLang's requests and batches: the attributes that our code reads, and no more."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

END_OF_TEXT = 1
VOCAB_SIZE = 100
MAX_NEW_TOKENS = 100

# Of the `SamplingParams` of a greedy request without further options.
SAMPLING_PARAMS = {
    "max_new_tokens": MAX_NEW_TOKENS,
    "min_new_tokens": 0,
    "ignore_eos": False,
    "stop_token_ids": None,
    "stop_strs": (),
    "stop_regex_strs": (),
    "temperature": 1.0,
    "top_k": 1,
    "top_p": 1.0,
    "min_p": 0.0,
    "custom_params": None,
}


def request_with(
    output_ids: Sequence[int] = (),
    *,
    prompt_ids: Sequence[int] = (0,) * 20,
    rid: str = "request",
    **changes: Any,
) -> Any:
    """A running `Req` with neutral values.

    Args:
        output_ids: generated so far.
        prompt_ids: of its prompt.
        rid: its id.
        changes: sampling parameters by the names of `SAMPLING_PARAMS`; any other name is an
            attribute of the request itself.
    """
    params = {name: changes.pop(name, value) for name, value in SAMPLING_PARAMS.items()}
    attributes = {
        "rid": rid,
        "origin_input_ids": list(prompt_ids),
        "output_ids": list(output_ids),
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": {END_OF_TEXT},
        "tokenizer": SimpleNamespace(additional_stop_token_ids=None, eos_token_id=END_OF_TEXT),
        "grammar": None,
        "custom_logit_processor": None,
        "return_logprob": False,
        "return_hidden_states": False,
        "return_sampling_mask": False,
        "reasoning_tokens": 0,
        "finished_len": None,
        "sampling_params": SimpleNamespace(**params),
    }
    return SimpleNamespace(**{**attributes, **changes})


def batch_of(*reqs: Any, lens: Sequence[int] | None = None, **changes: Any) -> Any:
    """A decode `ScheduleBatch`.

    Args:
        reqs: made by `request_with`.
        lens: committed tokens of each request; by default its prompt and output, less the anchor.
        changes: other values of the batch's attributes.
    """
    if lens is None:
        lens = [max(len(req.origin_input_ids) + len(req.output_ids) - 1, 0) for req in reqs]
    attributes = {
        "reqs": list(reqs),
        "seq_lens": torch.tensor(lens, dtype=torch.int64),
        "has_grammar": any(req.grammar is not None for req in reqs),
        "return_logprob": any(req.return_logprob for req in reqs),
        "mamba_track_indices": None,
        "sampling_info": SimpleNamespace(
            has_custom_logit_processor=any(req.custom_logit_processor is not None for req in reqs),
            is_all_greedy=all(req.sampling_params.top_k <= 1 for req in reqs),
        ),
    }
    return SimpleNamespace(**{**attributes, **changes})
