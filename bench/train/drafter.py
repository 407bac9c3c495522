"""The drafter's training: random anchors, blocks the verifier agrees with, soft targets."""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.train import data
from bench.train.data import Batch, Corpus
from bench.train.verifier.model import Verifier
from dflash_sglang.drafter.checkpoint import FULL, DraftConfig
from dflash_sglang.drafter.reference import DraftModel, LayerKV

BLOCK_SIZE = 16
ANCHORS = 16  # blocks a row
DECAY = 7.0  # draft i counts exp(-(i - 1) / DECAY): an early miss rejects all that follow


class Blocks(NamedTuple):
    """Training blocks cut from a batch of rows, all rows' blocks one after another."""

    ids: Tensor  # [rows * anchors, block] int64, anchor then masks
    positions: Tensor  # [rows * anchors, block] int64
    targets: Tensor  # [rows * anchors, block - 1] int64, verifier row that predicts the draft
    weights: Tensor  # [rows * anchors, block - 1] float32, 0: not trained on


class Teacher(NamedTuple):
    """The verifier's outputs for a batch."""

    taps: Tensor  # [rows, length, taps * hidden]
    logits: Tensor  # [rows * length, vocab]
    agrees: Tensor  # [rows, length] bool, whether a token is the verifier's own greedy choice


def draft_config(verifier: Verifier, taps: tuple[int, ...]) -> DraftConfig:
    """Two layers on top of the verifier's layers `taps`."""
    s = verifier.shape
    return DraftConfig(
        hidden_size=s.hidden_size,
        intermediate_size=384,
        num_layers=2,
        num_heads=s.num_heads,
        num_kv_heads=s.num_kv_heads,
        head_dim=s.head_dim,
        rotary_dim=s.head_dim,
        vocab_size=s.vocab_size,
        block_size=BLOCK_SIZE,
        target_layer_ids=taps,
        mask_token_id=data.MASK_ID,
        num_target_layers=s.num_layers,
        rope_theta=s.rope_theta,
        rope_type="default",
        rms_norm_eps=s.rms_norm_eps,
        max_position_embeddings=s.max_positions,
        attention_bias=False,
        layer_types=(FULL, FULL),
        layer_causal=(False, False),
        sliding_window=None,
    )


def cut_blocks(batch: Batch, agrees: Tensor, mask_id: int, generator: torch.Generator) -> Blocks:
    """Cut `ANCHORS` blocks from every row, anchors drawn from its answers.

    Drafts have a weight as far as the verifier would have written them: within the answer, up to
    the first token that is not its own choice.

    Args:
        batch: rows of text.
        agrees: [rows, length] bool, whether a token is the verifier's own greedy choice.
        mask_id: the mask token.
        generator: draws the anchors.
    """
    rows, length = batch.ids.shape
    eligible = batch.answer & F.pad(batch.answer[:, 1:], (0, 1))  # a draft must follow the anchor
    draw = torch.rand(rows, length, generator=generator).masked_fill(~eligible, -1)
    anchors = draw.topk(min(ANCHORS, length), dim=1).indices.flatten()  # [rows * anchors]
    row = torch.arange(rows).repeat_interleave(len(anchors) // rows)
    positions = anchors[:, None] + torch.arange(BLOCK_SIZE)
    inside = positions.clamp(max=length - 1)
    ids = torch.full_like(positions, mask_id)
    ids[:, 0] = batch.ids[row, anchors]
    trained = batch.answer[row[:, None], inside] & (positions < length)
    trained[:, 0] &= eligible[row, anchors]
    # Draft i depends on drafts 1 .. i - 1; its own token need not agree.
    trained[:, 2:] &= agrees[row[:, None], inside][:, 1:-1]
    decay = torch.exp(-torch.arange(BLOCK_SIZE - 1) / DECAY)
    weights = trained.cumprod(dim=1)[:, 1:] * decay
    return Blocks(ids, positions, row[:, None] * length + inside[:, 1:] - 1, weights)


def draft_logits(
    drafter: DraftModel, verifier: Verifier, batch: Batch, blocks: Blocks, taps: Tensor
) -> Tensor:
    """Logits [weighted drafts, vocab] of the drafts with a weight, in row-major order."""
    rows, length = batch.ids.shape
    repeats = len(blocks.ids) // rows
    context_positions = torch.arange(length).expand(rows, -1)
    context = [
        LayerKV(kv.key.repeat_interleave(repeats, 0), kv.value.repeat_interleave(repeats, 0))
        for kv in drafter.context_kv(taps, context_positions)
    ]
    hidden = drafter(
        F.embedding(blocks.ids, verifier.embed),
        blocks.positions,
        context,
        context_positions.repeat_interleave(repeats, 0),
        context_valid=torch.arange(length) < blocks.positions[:, :1],
    )
    return verifier.logits(hidden[:, 1:][blocks.weights > 0])


def drafter_step(
    drafter: DraftModel, verifier: Verifier, batch: Batch, generator: torch.Generator
) -> float:
    """Accumulate the gradients of one step: cross-entropy against the verifier's distribution."""
    taught = teacher(verifier, batch, drafter.config.target_layer_ids)
    blocks = cut_blocks(batch, taught.agrees, drafter.config.mask_token_id, generator)
    # Attention without a fused kernel: at these sizes its gradient is several times as fast.
    with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
        logits = draft_logits(drafter, verifier, batch, blocks, taught.taps)
    weighted = blocks.weights > 0
    wanted = taught.logits[blocks.targets[weighted]].softmax(-1)
    entropy = -(wanted * logits.log_softmax(-1)).sum(-1)
    loss = (entropy * blocks.weights[weighted]).sum() / blocks.weights.sum()
    loss.backward()
    return loss.item()


@torch.no_grad()
def drafter_measures(
    drafter: DraftModel, verifier: Verifier, held_out: Corpus, max_tokens: int
) -> dict[str, float]:
    """Mean commit length on held-out answers, as far as the verifier would have written them."""
    generator = torch.Generator().manual_seed(0)
    commit_lens: list[Tensor] = []
    for group in data.group_by_length(held_out, np.arange(len(held_out)), max_tokens):
        batch = data.pad(held_out, group)
        taught = teacher(verifier, batch, drafter.config.target_layer_ids)
        blocks = cut_blocks(batch, taught.agrees, drafter.config.mask_token_id, generator)
        weighted = blocks.weights > 0
        drafts = draft_logits(drafter, verifier, batch, blocks, taught.taps).argmax(-1)
        hit = torch.zeros_like(blocks.weights)
        hit[weighted] = (drafts == taught.logits[blocks.targets[weighted]].argmax(-1)).float()
        commit_lens.append(hit[weighted[:, 0]].cumprod(1).sum(1) + 1)
    return {"held_out_commit_len": round(float(torch.cat(commit_lens).mean()), 4)}


@torch.no_grad()
def teacher(verifier: Verifier, batch: Batch, taps: tuple[int, ...]) -> Teacher:
    """Run the verifier over a batch; `taps` are the layers the drafter sees."""
    out = verifier(batch.ids)
    logits = verifier.logits(out.hidden)
    agrees = torch.zeros_like(batch.answer)
    agrees[:, 1:] = logits[:, :-1].argmax(-1) == batch.ids[:, 1:]
    return Teacher(torch.cat([out.layers[i] for i in taps], dim=-1), logits.flatten(0, 1), agrees)
