"""The embedded verifier by transformers: the distribution that a server's answers must have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_sglang import zoo

BATCH = 256
Filter = Callable[[Tensor], Tensor]  # probabilities of n rows to filtered ones that sum to 1


class Outcome(NamedTuple):
    """An answer's first tokens."""

    ids: tuple[int, ...]
    probability: float


class ReferenceModel:
    """The verifier in float32, one full forward a token."""

    def __init__(self) -> None:
        path = zoo.path("moe").verifier
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.end_of_text: int = self.model.config.eos_token_id

    @torch.inference_mode()
    def logits(self, contexts: Sequence[Sequence[int]]) -> Tensor:
        """Next-token logits of contexts of one length, [n, vocab] float32."""
        parts = torch.split(torch.tensor([*map(list, contexts)]), BATCH)
        return torch.cat([self.model(part, logits_to_keep=1).logits[:, 0] for part in parts])

    def distribution(
        self,
        prompt_ids: Sequence[int],
        length: int,
        temperature: float,
        keep: Filter = lambda probs: probs,
        floor: float = 1e-4,
    ) -> list[Outcome]:
        """Every answer of `length` tokens that is not too rare, with its probability.

        Args:
            prompt_ids: the context.
            length: in tokens; an answer that ends earlier is shorter.
            temperature: above 0.
            keep: the filters.
            floor: less likely beginnings are left out; the probabilities sum to less than 1.
        """
        found: list[Outcome] = []
        growing = [Outcome((), 1.0)]
        for _ in range(length):
            if not growing:
                break
            contexts = [[*prompt_ids, *outcome.ids] for outcome in growing]
            probs = keep(torch.softmax(self.logits(contexts) / temperature, dim=-1))
            longer = list(_grown(growing, probs, floor))
            found += [outcome for outcome in longer if outcome.ids[-1] == self.end_of_text]
            growing = [outcome for outcome in longer if outcome.ids[-1] != self.end_of_text]
        return found + growing


def _grown(outcomes: Sequence[Outcome], probs: Tensor, floor: float) -> Iterator[Outcome]:
    for outcome, row in zip(outcomes, probs, strict=True):
        joint = outcome.probability * row.double()
        for token in (joint >= floor).nonzero().flatten().tolist():
            yield Outcome((*outcome.ids, token), float(joint[token]))
