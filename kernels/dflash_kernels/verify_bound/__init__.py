"""How much of one request's drafted block is worth verifying, decided where the drafts are."""

import torch
from torch import Tensor

from dflash_kernels.dispatch import check_dtype, check_shape, runs_triton
from dflash_kernels.verify_bound import reference
from dflash_kernels.verify_bound.reference import CLASSES, EDGES

__all__ = ["CLASSES", "EDGES", "verify_bound"]


def verify_bound(values: Tensor, lse: Tensor, acceptance: Tensor, prices: Tensor) -> Tensor:
    r"""The number of drafts whose verification is worth its price, for one request.

    With v_i and z_i the largest logit and the log normaliser of drafted position i = 1 .. n:

        c_i = exp(v_i - z_i)                        the drafter's probability of draft i
        k_i = number of EDGES at or below c_i       its class
        s_i = acceptance[k_1] * ... * acceptance[k_i]
        d   = argmax over 0 .. n of  s_1 + ... + s_d - prices[d]

    the largest such d among equals. s_i is the probability that draft i is accepted, so the sum is
    what verifying d drafts is expected to commit beside the bonus token. Nothing is read by the
    host: the result is a bound for the verify that follows on the same stream.

    One launch, one program.

    Args:
        values: [n] float32, any stride.
        lse: [n] float32, any stride.
        acceptance: [CLASSES] float32, P(a draft of a class is accepted | those before it are).
        prices: [n + 1] float32, price of verifying d drafts, in committed tokens; infinite for a
            number that may not be verified. At least one price is finite.

    Returns:
        [n + 2] int32: tokens to verify (d + 1, the anchor counted), drafts that may be accepted
        (d), and k_1 .. k_n. A position without a finite logit is in class 0.

    Raises:
        ValueError: shapes do not fit each other.
        TypeError: an argument is not float32.

    Example:
        >>> values, lse = torch.tensor([0.0, 0.0]), torch.tensor([0.001, 3.0])
        >>> acceptance = torch.linspace(0.05, 1.0, 11)
        >>> verify_bound(values, lse, acceptance, torch.tensor([0.0, 0.5, 1.0])).tolist()
        [2, 1, 10, 0]
    """
    (drafts,) = values.shape
    check_shape("lse", lse, drafts)
    check_shape("acceptance", acceptance, CLASSES)
    check_shape("prices", prices, drafts + 1)
    given = {"values": values, "lse": lse, "acceptance": acceptance, "prices": prices}
    for name, tensor in given.items():
        check_dtype(name, tensor, torch.float32)
    if not runs_triton(values):
        return reference.verify_bound(values, lse, acceptance, prices)
    from dflash_kernels.verify_bound import kernel

    got: Tensor = kernel.verify_bound_op(values, lse, acceptance, prices)
    return got
