"""Accept the longest prefix of the draft that the verifier would have produced itself."""

from torch import Tensor

from dflash_kernels.accept_match import reference
from dflash_kernels.dispatch import check_shape, runs_triton
from dflash_kernels.types import Acceptance

__all__ = ["accept_match"]


def accept_match(
    draft_ids: Tensor,
    verifier_ids: Tensor,
    prefix_lens: Tensor,
    *,
    limit: Tensor | None = None,
    extra_accept: Tensor | None = None,
) -> Acceptance:
    r"""Compare a drafted block with the verifier's tokens and commit the matching prefix plus one.

    With d the block (d_0 the anchor) and y_i the verifier's token after d_0 .. d_i:

        accept_len = max { n <= limit : y_{i-1} = d_i or extra_accept_{i-1}, for all 1 <= i <= n }

    and the committed tokens are d_1 .. d_{accept_len} and the bonus token y_{accept_len}. Without
    `extra_accept` accepted drafts equal the verifier's tokens, so y_0 .. y_{accept_len} is
    committed. The rule is then the same for greedy tokens and for tokens sampled from the verifier,
    whose distribution it keeps: a draft is a point mass, and whether it matches only decides how
    much of y is used, never what y is.

    One launch. A row of any width up to a few hundred is one program.

    Args:
        draft_ids: [bs, width] int64, column 0 the anchor.
        verifier_ids: [bs, width] int64, y.
        prefix_lens: [bs] int64, tokens in the KV cache before the verify.
        limit: [bs] int32, the most drafts a row may accept; None: all. Below 0 counts as 0.
        extra_accept: [bs, width - 1] bool, drafts accepted although they differ from y; None: none.

    Returns:
        The acceptance. Without `extra_accept`, `output_ids` is `verifier_ids` itself.

    Raises:
        ValueError: shapes do not fit each other.

    Example:
        >>> draft_ids = torch.tensor([[9, 1, 2, 3]])  # 9 is the anchor
        >>> verifier_ids = torch.tensor([[1, 2, 8, 4]])  # agrees with 1 and 2, not with 3
        >>> got = accept_match(draft_ids, verifier_ids, torch.tensor([10]))
        >>> got.accept_len.item(), got.bonus_ids.item(), got.new_seq_lens.item()
        (2, 8, 13)
    """
    bs, width = draft_ids.shape
    check_shape("verifier_ids", verifier_ids, bs, width)
    check_shape("prefix_lens", prefix_lens, bs)
    check_shape("limit", limit, bs)
    check_shape("extra_accept", extra_accept, bs, width - 1)
    if not runs_triton(draft_ids):
        return reference.accept_match(
            draft_ids, verifier_ids, prefix_lens, limit=limit, extra_accept=extra_accept
        )
    from dflash_kernels.accept_match import kernel

    got = Acceptance(
        *kernel.accept_match_op(draft_ids, verifier_ids, prefix_lens, limit, extra_accept)
    )
    # A custom op's output may not be its input: without exceptions it returns an empty tensor here.
    return got if extra_accept is not None else got._replace(output_ids=verifier_ids)
