"""Draw the verifier's token where requests filter their distribution, and accept what matches."""

import torch
from torch import Tensor

from dflash_kernels.accept_filtered import reference
from dflash_kernels.dispatch import runs_triton
from dflash_kernels.types import Acceptance, Filters

__all__ = ["accept_filtered"]


def accept_filtered(
    logits: Tensor,
    draft_ids: Tensor,
    prefix_lens: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    filters: Filters,
    *,
    limit: Tensor | None = None,
) -> Acceptance:
    r"""Sample and match with top-k, top-p and min-p, in two passes over the logits at most.

    With p = softmax(x_i / T) of column i, a token v is kept when

        #{u: p(u) > p(v)} < k,    sum of p(u) over p(u) > p(v)  < top_p,    p(v) >= min_p max p

    and y_i is drawn from p over the kept tokens by the Gumbel-max rule of `accept_sampled`, with
    its noise. Tokens of equal probability are kept or dropped together. Requests that do not filter
    draw what `accept_sampled` gives them. Of a filtered request the law is the ordinary sampler's,
    the draw is not: SGLang keys the noise of filtered rows by rank.

    Args:
        logits: [bs * width, V] bfloat16, float16 or float32, adjacent columns; finite or -inf, NaN
            counts as -inf.
        draft_ids: [bs, width] int64, column 0 the anchor.
        prefix_lens: [bs] int64, tokens in the KV cache before the verify; the anchor's position.
        temperatures: [bs] float32; 0 stands for greedy, argmax without noise.
        seeds: [bs] int64; for a request without a seed, a fresh random number every step.
        filters: of every request.
        limit: [bs] int32, the most drafts a row may accept; None: all.

    Returns:
        The acceptance; `output_ids` is y.

    Source: the kept tokens are those of FlashInfer's `top_k_top_p_sampling_from_probs` with joint
        filters, which SGLang's sampler calls on CUDA, and min-p as in its torch form.
    """
    if not runs_triton(logits):
        return reference.accept_filtered(
            logits, draft_ids, prefix_lens, temperatures, seeds, filters, limit=limit
        )
    given = (logits, draft_ids, prefix_lens, temperatures, seeds, *filters, limit)
    return Acceptance(*_accept_filtered(*given))


@torch.library.custom_op("dflash::accept_filtered", mutates_args=())
def _accept_filtered(
    logits: Tensor,
    draft_ids: Tensor,
    prefix_lens: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    limit: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from dflash_kernels.accept_filtered import kernel

    filters = Filters(top_ks, top_ps, min_ps)
    return kernel.accept_filtered(
        logits, draft_ids, prefix_lens, temperatures, seeds, filters, limit=limit
    )


@_accept_filtered.register_fake
def _(
    logits: Tensor,
    draft_ids: Tensor,
    prefix_lens: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    limit: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return Acceptance.empty(draft_ids, prefix_lens)
