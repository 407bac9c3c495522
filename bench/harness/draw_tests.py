"""Many sampled answers to one prompt against the verifier's distribution of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from scipy.stats import chisquare

from bench.harness.requests import greedy, send
from bench.harness.verifier_distribution import Filter, Outcome, ReferenceModel
from dflash_sglang import zoo
from launch.client import Client

REJECT = 1e-6  # a correct rule is rejected once in a million runs
LENGTH = 4  # the first token comes from the prefill, the others from verifies
HOT = 2.5  # the verifier is sure of itself: below, it hardly branches
BATCH = 60
MIN_EXPECTED = 5.0  # of a cell, as the chi-square approximation wants it
BLOCK_ARGS = ("--speculative-dflash-block-size", "4")  # longer blocks reach past LENGTH

Counts = Counter[tuple[int, ...]]


class Sampling(NamedTuple):
    """Sampling parameters that the reference model applies as well."""

    temperature: float = HOT
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0


DEFAULT = Sampling()


class Draws(NamedTuple):
    """What a server answered."""

    counts: Counts
    tau: float  # committed tokens per verify


def context(model: ReferenceModel) -> list[int]:
    """Token ids whose continuation branches at every step, while its drafts are often accepted.

    The middle of an answer about sorting: at HOT the likeliest of the next tokens have
    probabilities of 0.4 to 0.97. Where the verifier is sure, every rule gives the same answers.
    """
    ids = list(model.tokenizer(zoo.prompts("moe")["sort"][3].text)["input_ids"])
    for _ in range(21):
        ids.append(int(model.logits([ids])[0].argmax()))
    return ids


def draw(
    server: Client,
    ids: Sequence[int],
    number: int,
    sampling: Sampling = DEFAULT,
    custom_params: Mapping[str, object] | None = None,
) -> Draws:
    """Draws `number` answers (a multiple of BATCH) of LENGTH tokens to a context."""
    payload = greedy(ids, LENGTH, n=BATCH, custom_params=custom_params, **sampling._asdict())
    counts: Counts = Counter()
    tokens = verifies = 0
    for _ in range(number // BATCH):
        for answer in send(server, payload):
            counts[tuple(answer["output_ids"])] += 1
            tokens += answer["meta_info"]["completion_tokens"] - 1  # one is the prefill's
            verifies += answer["meta_info"].get("spec_verify_ct", 0)
    return Draws(counts, tokens / max(verifies, 1))


def distribution(
    model: ReferenceModel, ids: Sequence[int], sampling: Sampling = DEFAULT
) -> list[Outcome]:
    """The verifier's distribution of those answers."""
    return model.distribution(ids, LENGTH, sampling.temperature, _filters(sampling))


def p_value(counts: Counts, expected: Sequence[Outcome]) -> float:
    """Of the hypothesis that the counts were drawn from the distribution."""
    number = counts.total()
    cells = [cell for cell in expected if cell.probability * number >= MIN_EXPECTED]
    observed = [counts[cell.ids] for cell in cells]
    wanted = [cell.probability * number for cell in cells]
    # Everything else is one cell.
    observed.append(number - sum(observed))
    wanted.append(number - sum(wanted))
    if wanted[-1] < MIN_EXPECTED:
        observed[-2:], wanted[-2:] = [sum(observed[-2:])], [sum(wanted[-2:])]
    return float(chisquare(observed, wanted).pvalue)


def _filters(sampling: Sampling) -> Filter:
    import torch
    from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch

    def keep(probs: torch.Tensor) -> torch.Tensor:
        rows = len(probs)
        top_k = probs.shape[1] if sampling.top_k < 0 else sampling.top_k
        _, weights, ids, _ = top_k_top_p_min_p_sampling_from_probs_torch(
            probs,
            torch.full((rows,), top_k),
            torch.full((rows,), sampling.top_p),
            torch.full((rows,), sampling.min_p),
            True,
            None,
            torch.zeros(rows, dtype=torch.int64),
            return_filtered_probs=True,
        )
        filtered = torch.zeros_like(probs).scatter_(1, ids.long(), weights)
        return filtered / filtered.sum(dim=1, keepdim=True)

    return keep
