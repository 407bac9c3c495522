"""From exchanges to token rows: the tokenizer, encoded documents and batches of little padding."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from bench.train import grammar
from bench.train.grammar import Exchange

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
PAD_ID, END_ID, MASK_ID = 0, 2, 3
VOCAB_SIZE = 1024
# Words with their leading space, single digits, groups of signs, line breaks. One digit a token:
# arithmetic stays column by column.
_SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TWO_TURN_SHARE = 0.15  # of the documents: a second exchange follows the first


class Corpus(NamedTuple):
    """Encoded documents, one after another."""

    ids: np.ndarray  # [tokens] uint16
    answer: np.ndarray  # [tokens] bool, part of an answer or its end marker
    start: np.ndarray  # [documents + 1] int64, document i is ids[start[i] : start[i + 1]]

    def __len__(self) -> int:
        return len(self.start) - 1


class Batch(NamedTuple):
    """Documents padded to the longest of them."""

    ids: Tensor  # [rows, length] int64
    answer: Tensor  # [rows, length] bool
    valid: Tensor  # [rows, length] bool, False on padding


def chat(question: str) -> str:
    """A question in the chat format, up to where the answer starts."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def training_exchanges(seed: int) -> Iterator[Exchange]:
    """The endless stream without held-out answers."""
    return (e for e in grammar.exchanges(seed) if not grammar.held_out(e))


def held_out_exchanges(seed: int, per_family: int) -> dict[str, list[Exchange]]:
    """Distinct held-out questions, `per_family` of each family."""
    found: dict[str, dict[str, Exchange]] = {family: {} for family in grammar.FAMILIES}
    for exchange in filter(grammar.held_out, grammar.exchanges(seed)):
        questions = found[exchange.family]
        if len(questions) < per_family:
            questions.setdefault(exchange.question, exchange)
        elif all(len(questions) >= per_family for questions in found.values()):
            break
    return {family: list(questions.values()) for family, questions in found.items()}


def train_tokenizer(seed: int, documents: int, file: Path) -> Tokenizer:
    """A byte-level BPE of `VOCAB_SIZE` tokens over the first `documents` training exchanges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (
        chat(e.question) + e.answer for e in itertools.islice(training_exchanges(seed), documents)
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(file))
    return tokenizer


def encode(tokenizer: Tokenizer, turns: list[Exchange]) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation and, for each, whether it is part of an answer."""
    ids: list[int] = []
    answer: list[bool] = []
    for turn in turns:
        question = tokenizer.encode(chat(turn.question)).ids
        its_answer = tokenizer.encode(turn.answer + "<|im_end|>\n").ids
        ids += question + its_answer
        answer += [False] * len(question) + [True] * len(its_answer)
    return ids, answer


def build_corpus(tokenizer: Tokenizer, seed: int, documents: int) -> Corpus:
    """Encode `documents` training conversations."""
    rng = random.Random(seed)
    stream = training_exchanges(seed)
    encoded = []
    for _ in range(documents):
        turns = 2 if rng.random() < TWO_TURN_SHARE else 1
        encoded.append(encode(tokenizer, list(itertools.islice(stream, turns))))
    return pack(encoded)


def pack(encoded: list[tuple[list[int], list[bool]]]) -> Corpus:
    """Lay encoded documents end to end."""
    lengths = [len(ids) for ids, _ in encoded]
    return Corpus(
        ids=np.fromiter(itertools.chain.from_iterable(ids for ids, _ in encoded), np.uint16),
        answer=np.fromiter(
            itertools.chain.from_iterable(answer for _, answer in encoded), np.bool_
        ),
        start=np.concatenate([[0], np.cumsum(lengths)]),
    )


def save_corpus(corpus: Corpus, file: Path) -> None:
    """Write a corpus as one npz file."""
    np.savez(file, **corpus._asdict())


def load_corpus(file: Path) -> Corpus:
    """Read what `save_corpus` wrote."""
    with np.load(file) as arrays:
        return Corpus(**{name: arrays[name] for name in Corpus._fields})


def batch_plan(corpus: Corpus, seed: int, max_tokens: int, pool: int = 512) -> list[np.ndarray]:
    """Split the corpus into groups of documents, in training order.

    A group is one padded batch. Groups come from shuffled pools of `pool` documents, sorted by
    length: little padding, and neighbouring groups still differ.
    """
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(corpus))
    plan: list[np.ndarray] = []
    for first in range(0, len(order) - pool + 1, pool):
        groups = group_by_length(corpus, order[first : first + pool], max_tokens)
        plan += [groups[i] for i in rng.permutation(len(groups))]
    return plan


def group_by_length(corpus: Corpus, documents: np.ndarray, max_tokens: int) -> list[np.ndarray]:
    """Split documents into groups of similar length, each of at most `max_tokens` when padded."""
    lengths = padded_length(corpus.start[documents + 1] - corpus.start[documents])
    groups: list[list[int]] = [[]]
    for i in np.argsort(lengths, kind="stable"):
        if groups[-1] and (len(groups[-1]) + 1) * lengths[i] > max_tokens:
            groups.append([])
        groups[-1].append(int(documents[i]))
    return [np.array(group) for group in groups]


def padded_length(length: Any) -> Any:
    """Round up to a multiple of 8: the CPU's matrix library prepares every new shape anew."""
    return (length + 7) // 8 * 8


def pad(corpus: Corpus, documents: np.ndarray) -> Batch:
    """The given documents as one batch."""
    spans = [(int(corpus.start[i]), int(corpus.start[i + 1])) for i in documents]
    length = padded_length(max(end - begin for begin, end in spans))
    ids = torch.full((len(spans), length), PAD_ID, dtype=torch.int64)
    answer = torch.zeros((len(spans), length), dtype=torch.bool)
    valid = torch.zeros((len(spans), length), dtype=torch.bool)
    for row, (begin, end) in enumerate(spans):
        ids[row, : end - begin] = torch.from_numpy(corpus.ids[begin:end].astype(np.int64))
        answer[row, : end - begin] = torch.from_numpy(corpus.answer[begin:end])
        valid[row, : end - begin] = True
    return Batch(ids, answer, valid)
