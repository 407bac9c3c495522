"""Draw the verifier's token at every position of a block and accept the drafts that match it."""

import torch
from torch import Tensor

from dflash_kernels.accept_sampled import reference
from dflash_kernels.dispatch import check_dtype, check_shape, runs_triton
from dflash_kernels.types import Acceptance

__all__ = ["accept_sampled", "check_arguments"]


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
    the verifier's token at block position i is drawn by the Gumbel-max rule

        y_i = argmax_v  x_i[v] / T + g(hash(seed, L + i, v)),     g(u) = -log(-log(u))

    and the block is accepted as by `accept_match`. y_i follows softmax(x_i / T), whatever the draft
    is. The hash is that of SGLang's seeded sampling, keyed by the position of the token that is
    sampled from, so a request draws the same text with and without speculation; see README.md for
    how closely.

    Rows with top-k, top-p or min-p are drawn by `accept_filtered`. Penalties, grammar masks and
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

    Raises:
        ValueError: shapes do not fit each other.
        TypeError: logits that are not floating point, or seeds that are not int64.
    """
    check_arguments(logits, draft_ids, prefix_lens, temperatures, seeds, limit)
    given = (logits, draft_ids, prefix_lens, temperatures, seeds)
    if not runs_triton(logits):
        return reference.accept_sampled(*given, limit=limit)
    from dflash_kernels.accept_sampled import kernel

    return Acceptance(*kernel.accept_sampled_op(*given, limit))


def check_arguments(
    logits: Tensor,
    draft_ids: Tensor,
    prefix_lens: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    limit: Tensor | None,
) -> None:
    """Refuse what `accept_sampled` and `accept_filtered` cannot take; errors are as there."""
    bs, width = draft_ids.shape
    check_dtype("logits", logits, torch.float32, torch.bfloat16, torch.float16)
    check_dtype("seeds", seeds, torch.int64)
    check_shape("logits", logits, bs * width, logits.shape[-1])
    for name, tensor in (
        ("prefix_lens", prefix_lens),
        ("temperatures", temperatures),
        ("seeds", seeds),
        ("limit", limit),
    ):
        check_shape(name, tensor, bs)
