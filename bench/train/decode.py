"""Greedy decoding with the transformers model: batched, and speculative against a drafter.

Independent of the serving code: transformers' own models and cache, and the reference drafter.
"""

import copy
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from bench.train.data import END_ID, PAD_ID
from dflash_sglang.drafter.reference import DraftModel, LayerKV


class Speculation(NamedTuple):
    """One answer decoded speculatively."""

    ids: list[int]
    commit_lens: list[int]  # tokens committed by each verify step
    accept_lens: list[int]  # drafts accepted by each verify step, beyond the end token too
    confidences: list[list[float]]  # the drafter's probability of every draft, by step


def load_verifier(directory: Path) -> Any:
    """The checkpoint as transformers loads it, in float32, all experts in one matmul."""
    ALL_EXPERTS_FUNCTIONS.register("batched_all", _all_experts)
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, experts_implementation="batched_all"
    )
    return model.eval().requires_grad_(False)


@torch.inference_mode()
def decode_batch(model: Any, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    """Greedy answers, ended by the end token; shorter prompts are padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[PAD_ID] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    columns: list[Tensor] = []
    ended = torch.zeros(len(prompts), dtype=torch.bool)
    for _ in range(max_new_tokens):
        out = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        columns.append(out.logits[:, -1].argmax(-1))
        ended |= columns[-1] == END_ID
        if ended.all():
            break
        ids, positions = columns[-1][:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
    return [_until_end(row) for row in torch.stack(columns, dim=1).tolist()]


@torch.inference_mode()
def speculate(
    model: Any, drafter: DraftModel, prompt: list[int], block_size: int, max_new_tokens: int
) -> Speculation:
    """Draft a block, verify it in one forward, keep the longest prefix the verifier agrees with.

    Only the prompt is cached; the answer so far is computed again with every block, because a
    recurrent state cannot forget rejected tokens (`DynamicCache.crop` leaves it as it was).
    """
    embed, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    taps_of = drafter.config.target_layer_ids
    prompt_cache = DynamicCache(config=model.config)
    hidden, logits = _forward(model, torch.tensor([prompt]), prompt_cache, taps_of)
    answer, committed = [int(logits[-1].argmax())], len(prompt)
    context = drafter.context_kv(hidden, torch.arange(committed)[None])
    commit_lens, accept_lens, confidences = [], [], []
    while len(answer) < max_new_tokens and answer[-1] != END_ID:
        ids = drafter.block_ids(torch.tensor(answer[-1:]), block_size)
        positions = committed + torch.arange(block_size)[None]
        block = drafter(F.embedding(ids, embed), positions, context, torch.arange(committed)[None])
        probabilities, drafts = F.linear(block[0, 1:], head).softmax(-1).max(-1)
        ids[0, 1:] = drafts
        answer_ids = torch.tensor([answer[:-1]], dtype=torch.int64)
        hidden, logits = _forward(
            model, torch.cat([answer_ids, ids], dim=1), copy.deepcopy(prompt_cache), taps_of
        )
        hidden, targets = hidden[:, -block_size:], logits[-block_size:].argmax(-1)
        accept_len = int((targets[:-1] == drafts).int().cumprod(0).sum())
        commit_len = accept_len + 1
        fresh = drafter.context_kv(hidden[:, :commit_len], positions[:, :commit_len])
        context = [_append(old, new) for old, new in zip(context, fresh, strict=True)]
        committed += commit_len
        new_ids = _until_end(targets[:commit_len].tolist())[: max_new_tokens - len(answer)]
        answer += new_ids
        commit_lens.append(len(new_ids))
        accept_lens.append(accept_len)
        confidences.append(probabilities.tolist())
    return Speculation(answer, commit_lens, accept_lens, confidences)


def _forward(
    model: Any, ids: Tensor, cache: DynamicCache, layers: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Tapped states [1, length, taps * hidden] and logits [length, vocab]."""
    out = model(input_ids=ids, past_key_values=cache, use_cache=True, output_hidden_states=True)
    # hidden_states[0] is the embedding, [i + 1] the output of layer i.
    return torch.cat([out.hidden_states[i + 1] for i in layers], dim=-1), out.logits[0]


def _append(old: LayerKV, new: LayerKV) -> LayerKV:
    return LayerKV(torch.cat([old.key, new.key], 1), torch.cat([old.value, new.value], 1))


def _until_end(ids: list[int]) -> list[int]:
    return ids[: ids.index(END_ID) + 1] if END_ID in ids else ids


def _all_experts(experts: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Every expert on every token, weighted by the router: quick for a handful of small experts."""
    share = x.new_zeros(len(x), experts.num_experts).scatter_(1, chosen, weights.to(x.dtype))
    gate, up = torch.matmul(x, experts.gate_up_proj.mT).chunk(2, dim=-1)
    inner = F.silu(gate) * up * share.T[..., None]  # [experts, tokens, expert_size]
    return torch.bmm(inner, experts.down_proj.mT).sum(0)
