"""The stages of training an embedded pair: data, verifier, drafter, pack, evaluate."""

import json
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from bench.train import data, export
from bench.train.card import count_parameters, render
from bench.train.drafter import draft_config, drafter_measures, drafter_step
from bench.train.evaluate import evaluate
from bench.train.fit import Measures, fit
from bench.train.grammar import Exchange
from bench.train.recipes import RECIPES, PairRecipe
from bench.train.verifier.model import Verifier
from dflash_sglang.drafter.checkpoint import load_config
from dflash_sglang.drafter.reference import DraftModel

SEED = 20
TOKENIZER_DOCUMENTS = 20_000
CORPUS_DOCUMENTS = 160_000
HELD_OUT_PER_FAMILY = 60
SPECULATED_PER_FAMILY = 30
BATCH_TOKENS = 2048  # padded tokens of one forward
STEP_BATCHES = 2  # forwards of a verifier step
DRAFTER_BATCH_TOKENS = 1024  # padded tokens of a drafter step; blocks are cut from every row
BALANCE_WEIGHT = 0.01


def data_stage(work: Path) -> None:
    """Tokenizer, training corpus and held-out exchanges."""
    tokenizer = data.train_tokenizer(SEED, TOKENIZER_DOCUMENTS, work / "tokenizer.json")
    held_out = data.held_out_exchanges(SEED + 1, HELD_OUT_PER_FAMILY)
    listed = {family: [e._asdict() for e in found] for family, found in held_out.items()}
    (work / "held_out.json").write_text(json.dumps(listed, indent=1), encoding="utf-8")
    corpus = data.build_corpus(tokenizer, SEED + 2, CORPUS_DOCUMENTS)
    data.save_corpus(corpus, work / "corpus.npz")
    print(
        f"{len(corpus)} documents, {len(corpus.ids)} tokens, {corpus.answer.mean():.2f} in answers"
    )


def verifier_stage(work: Path, recipe: PairRecipe, compiled: bool) -> None:
    """Train the verifier; the state ends in verifier.pt, the history in verifier.json."""
    torch.manual_seed(SEED)
    model = Verifier(recipe.shape)
    if compiled:
        model.compile_layers()
    corpus = data.load_corpus(work / "corpus.npz")
    held_out = _held_out_corpus(work)
    plan = data.batch_plan(corpus, SEED, BATCH_TOKENS)

    def step_loss(step: int) -> float:
        groups = (
            plan[i % len(plan)] for i in range(step * STEP_BATCHES, (step + 1) * STEP_BATCHES)
        )
        return verifier_step(model, [data.pad(corpus, group) for group in groups])

    history = fit(
        model,
        recipe.verifier,
        step_loss,
        lambda: verifier_measures(model, held_out),
        work / "verifier.pt",
    )
    (work / "verifier.json").write_text(
        json.dumps({"recipe": recipe.verifier._asdict(), "history": history})
    )


def verifier_step(model: Verifier, batches: list[data.Batch]) -> float:
    """Accumulate the gradients of one step; the loss is the mean over answer tokens."""
    total = sum(int(batch.answer[:, 1:].sum()) for batch in batches)
    summed = 0.0
    for batch in batches:
        out = model(batch.ids)
        answer = batch.answer[:, 1:]
        loss = F.cross_entropy(
            model.logits(out.hidden[:, :-1][answer]), batch.ids[:, 1:][answer], reduction="sum"
        )
        ((loss / total) + BALANCE_WEIGHT * out.balance_loss / len(batches)).backward()
        summed += loss.item()
    return summed / total


@torch.no_grad()
def verifier_measures(model: Verifier, held_out: data.Corpus) -> Measures:
    """Perplexity and top-1 accuracy over held-out answer tokens."""
    nll, hits, count = 0.0, 0, 0
    for group in data.group_by_length(held_out, np.arange(len(held_out)), BATCH_TOKENS):
        batch = data.pad(held_out, group)
        answer = batch.answer[:, 1:]
        logits = model.logits(model(batch.ids).hidden[:, :-1][answer])
        targets = batch.ids[:, 1:][answer]
        nll += F.cross_entropy(logits, targets, reduction="sum").item()
        hits += int((logits.argmax(-1) == targets).sum())
        count += len(targets)
    return {
        "held_out_ppl": round(math.exp(nll / count), 5),
        "held_out_top1": round(hits / count, 5),
    }


def drafter_stage(work: Path, recipe: PairRecipe, compiled: bool) -> None:
    """Train the drafter; the state ends in drafter.pt, the history in drafter.json."""
    verifier = load_trained(work, recipe)
    if compiled:
        verifier.compile_layers()
    torch.manual_seed(SEED)
    drafter = DraftModel(draft_config(verifier, recipe.taps))
    for param in drafter.parameters():
        if param.ndim == 2:
            torch.nn.init.normal_(param, std=0.02)
    corpus, held_out = data.load_corpus(work / "corpus.npz"), _held_out_corpus(work)
    plan = data.batch_plan(corpus, SEED + 3, DRAFTER_BATCH_TOKENS)

    def step_loss(step: int) -> float:
        generator = torch.Generator().manual_seed(step)
        batch = data.pad(corpus, plan[step % len(plan)])
        return drafter_step(drafter, verifier, batch, generator)

    def measure() -> Measures:
        return drafter_measures(drafter, verifier, held_out, BATCH_TOKENS)

    history = fit(drafter, recipe.drafter, step_loss, measure, work / "drafter.pt")
    (work / "drafter.json").write_text(
        json.dumps({"recipe": recipe.drafter._asdict(), "history": history})
    )


def pack_stage(work: Path, recipe: PairRecipe) -> None:
    """Write both models in bfloat16 under pair/."""
    verifier = load_trained(work, recipe)
    drafter = DraftModel(draft_config(verifier, recipe.taps))
    drafter.load_state_dict(torch.load(work / "drafter.pt", weights_only=True)["model"])
    export.export_verifier(verifier, work / "tokenizer.json", work / "pair" / "verifier")
    export.export_drafter(drafter, work / "pair" / "drafter")
    listed = {
        family: [{"question": e.question, "answer": e.reference} for e in found]
        for family, found in held_out_exchanges(work).items()
    }
    text = json.dumps(listed, indent=1, ensure_ascii=False)
    (work / "pair" / "prompts.json").write_text(text + "\n", encoding="utf-8")


def evaluate_stage(work: Path, name: str) -> None:
    """Measure the packed pair on held-out prompts and write pair/eval.json and pair/CARD.md."""
    pair = work / "pair"
    measured = evaluate(
        pair / "verifier",
        pair / "drafter",
        held_out_exchanges(work),
        blocks=(4, 8, 16),
        speculated=SPECULATED_PER_FAMILY,
    )
    for part in ("verifier", "drafter"):
        measured[part] = json.loads((work / f"{part}.json").read_text(encoding="utf-8"))
        measured[part]["parameters"] = count_parameters(pair / part)
    (pair / "eval.json").write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    card = render(name, measured, RECIPES[name], load_config(pair / "drafter"))
    (pair / "CARD.md").write_text(card, encoding="utf-8")


def load_trained(work: Path, recipe: PairRecipe) -> Verifier:
    """The trained verifier, its weights rounded to bfloat16 as they are served."""
    verifier = Verifier(recipe.shape)
    verifier.load_state_dict(torch.load(work / "verifier.pt", weights_only=True)["model"])
    with torch.no_grad():
        for param in verifier.parameters():
            param.copy_(param.bfloat16())
    return verifier.requires_grad_(False)


def held_out_exchanges(work: Path) -> dict[str, list[Exchange]]:
    """The exchanges that the data stage kept from training, by family."""
    listed = json.loads((work / "held_out.json").read_text(encoding="utf-8"))
    return {family: [Exchange(**e) for e in found] for family, found in listed.items()}


def _held_out_corpus(work: Path, per_family: int = 16) -> data.Corpus:
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    chosen = [e for found in held_out_exchanges(work).values() for e in found[:per_family]]
    return data.pack([data.encode(tokenizer, [exchange]) for exchange in chosen])
