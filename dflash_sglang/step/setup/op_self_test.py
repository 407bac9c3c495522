"""Whether our Triton ops serve on this device, found out before the first request."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from dflash_kernels import dispatch
from dflash_kernels.self_test import OpError, self_test
from dflash_kernels.types import ServerShapes
from sglang.srt.runtime_context import get_parallel

from dflash_sglang.config import SETTINGS_FLAG, OpsChoice
from dflash_sglang.core.accept import REJECTIONS, Rule
from dflash_sglang.errors import OpsError
from dflash_sglang.step.draft.tail import dtype_of, ids_of
from dflash_sglang.step.setup.layer_stack import CACHE_DTYPES

if TYPE_CHECKING:
    from dflash_kernels.late_compiles import LateCompile

logger = logging.getLogger(__name__)


def op_shapes(
    widths: tuple[int, ...],
    vocab_size: int,
    lm_head: Any,
    top: int,
    draft_model: Any,
    cache_dtype: torch.dtype,
    rule: Rule,
) -> ServerShapes:
    """What the ops of this server will be given.

    Args:
        widths: that steps may have, ascending.
        vocab_size: of the verifier.
        lm_head: of the verifier, on this rank.
        top: candidates of a drafted position.
        draft_model: SGLang's drafter.
        cache_dtype: of the drafter's KV pool.
        rule: by which sampled requests accept.
    """
    attention = draft_model.layers[0].self_attn
    rotary, dtype = attention.rotary_emb, attention.k_norm.weight.dtype
    head_ids, _ = ids_of(lm_head, get_parallel().tp_group.world_size)
    shard = getattr(lm_head, "shard_indices", None)  # not every head has a shard
    return ServerShapes(
        widths=widths,
        vocab_size=vocab_size,
        head_ids=head_ids,
        head_dtype=dtype_of(lm_head) or dtype,
        head_columns=head_ids if shard is None else shard.num_elements_padded,
        top=top,
        dtype=dtype,
        layers=len(draft_model.layers),
        kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        rotary_dim=rotary.rotary_dim,
        # An embedding without a table is left to SGLang's own kernels.
        rotary_dtype=rotary.cos_sin_cache.dtype if hasattr(rotary, "cos_sin_cache") else dtype,
        # Other pools are written by SGLang's own kernels.
        cache_dtype=cache_dtype if cache_dtype in CACHE_DTYPES else dtype,
        rejection=None if rule is Rule.MATCH else REJECTIONS[rule].__name__,
    )


def prepare_ops(ops: str, device: torch.device | str, shapes: ServerShapes) -> None:
    """Test the Triton ops, or switch to the torch references.

    Args:
        ops: the setting of that name.
        device: that will serve.
        shapes: what they will be given.

    Raises:
        OpsError: an op does not compile here or computes something else than its reference.
    """
    if torch.device(device).type != "cuda":
        return
    if ops == OpsChoice.REFERENCE.value:
        dispatch.use_reference()
        logger.info("DFLASH device ops: torch references.")
        return
    try:
        seconds = self_test(device, shapes)
    except OpError as problem:
        raise OpsError(
            f"device op {problem}. Serve with torch only: {SETTINGS_FLAG} FILE with "
            f'{{"ops": "{OpsChoice.REFERENCE.value}"}}, and please report it.'
        ) from problem
    logger.info(
        "DFLASH device ops: Triton, self-test passed (%s).",
        ", ".join(f"{op} {1000 * took:.0f} ms" for op, took in seconds.items()),
    )


def watch_compiles(device: torch.device | str) -> None:
    """Log every kernel that is compiled from now on, while requests wait for it.

    Call it once, when all is ready to serve. The start has compiled what our ops launch, so one of
    ours is a fault, and a warning. Kernels of SGLang and of libraries stop the server as long; they
    are named, and told apart, for whoever looks for what did.

    Args:
        device: that serves.
    """
    if torch.device(device).type != "cuda":
        return
    from dflash_kernels import late_compiles  # imports triton

    late_compiles.watch(log_compile)


def log_compile(late: LateCompile) -> None:
    """One line."""
    if late.reason is None:
        logger.info(
            "Triton kernel %s, not one of DFLASH's, was made ready while serving: %.2f s.",
            late.kernel,
            late.seconds,
        )
        return
    logger.warning(
        "DFLASH compiled a kernel of op %s while serving, and requests waited %.2f s: %s, %s. "
        "The start should have compiled it: please report this line.",
        late.op,
        late.seconds,
        late.kernel,
        late.reason,
    )
