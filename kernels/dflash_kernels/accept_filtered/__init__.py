"""Draw the verifier's token where requests filter their distribution, and accept what matches."""

from torch import Tensor

from dflash_kernels.accept_filtered import reference
from dflash_kernels.accept_sampled import check_arguments
from dflash_kernels.dispatch import check_shape, runs_triton
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

    With p = softmax(x_i / T) at block position i, a token v is kept when

        #{u: p(u) > p(v)} < k,    sum of p(u) over p(u) > p(v)  < top_p,    p(v) >= min_p max p

    and y_i is drawn from p over the kept tokens by the Gumbel-max rule of `accept_sampled`, with
    its noise. Tokens of equal probability are kept or dropped together. Requests that do not filter
    get the draw of `accept_sampled`. A filtered request's distribution is the ordinary sampler's,
    its draw is not: SGLang keys the noise of filtered rows by rank.

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

    Raises:
        ValueError: shapes do not fit each other.
        TypeError: logits that are not floating point, or seeds that are not int64.

    Source: the kept tokens are those of FlashInfer's `top_k_top_p_sampling_from_probs` with joint
        filters, which SGLang's sampler calls on CUDA, and min-p as in its torch form.
    """
    check_arguments(logits, draft_ids, prefix_lens, temperatures, seeds, limit)
    for name, values in zip(Filters._fields, filters, strict=True):
        check_shape(name, values, draft_ids.shape[0])
    given = (logits, draft_ids, prefix_lens, temperatures, seeds)
    if not runs_triton(logits):
        return reference.accept_filtered(*given, filters, limit=limit)
    from dflash_kernels.accept_filtered import kernel

    return Acceptance(*kernel.accept_filtered_op(*given, *filters, limit))
