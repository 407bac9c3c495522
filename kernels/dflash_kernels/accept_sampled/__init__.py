"""Draw the verifier's token at every position of a block and accept the drafts that match it."""

import torch
from torch import Tensor

from dflash_kernels.accept_sampled import reference
from dflash_kernels.dispatch import runs_triton
from dflash_kernels.types import Acceptance

__all__ = ["accept_sampled"]


def accept_sampled(
    logits: Tensor,
    draft_ids: Tensor,
    prefix_lens: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    *,
    limit: Tensor | None = None,
) -> Acceptance:
    r"""Sample and match, for rows without filters, in one pass over the logits.

    With x_i the logits after d_0 .. d_i, T the temperature and L the prefix length of a request,
    the verifier's token at column i is drawn by the Gumbel-max rule

        y_i = argmax_v  x_i[v] / T + g(hash(seed, L + i, v)),     g(u) = -log(-log(u))

    and the block is accepted as by `accept_match`. y_i follows softmax(x_i / T), whatever the draft
    is. The hash is that of SGLang's seeded sampling, keyed by the position of the token that is
    sampled from, so a request draws the same text with and without speculation; see README.md for
    how closely.

    Rows with top-k, top-p or min-p are the caller's: `output_ids` holds y for the other rows, the
    caller puts its own draws in theirs and calls `accept_match`. Penalties, grammar masks and
    logit bias are applied to the logits before.

    Args:
        logits: [bs * width, V] bfloat16, float16 or float32, adjacent columns; finite or -inf, NaN
            counts as -inf.
        draft_ids: [bs, width] int64, column 0 the anchor.
        prefix_lens: [bs] int64, tokens in the KV cache before the verify; the anchor's position.
        temperatures: [bs] float32; 0 stands for greedy, argmax without noise.
        seeds: [bs] int64; for a request without a seed, a fresh random number every step.
        limit: [bs] int32, the most drafts a row may accept; None: all.

    Returns:
        The acceptance; `output_ids` is y.
    """
    if not runs_triton(logits):
        return reference.accept_sampled(
            logits, draft_ids, prefix_lens, temperatures, seeds, limit=limit
        )
    return Acceptance(*_accept_sampled(logits, draft_ids, prefix_lens, temperatures, seeds, limit))


@torch.library.custom_op("dflash::accept_sampled", mutates_args=())
def _accept_sampled(
    logits: Tensor,
    draft_ids: Tensor,
    prefix_lens: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    limit: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from dflash_kernels.accept_sampled import kernel

    return kernel.accept_sampled(logits, draft_ids, prefix_lens, temperatures, seeds, limit=limit)


@_accept_sampled.register_fake
def _(
    logits: Tensor,
    draft_ids: Tensor,
    prefix_lens: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    limit: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return Acceptance.empty(draft_ids, prefix_lens)
