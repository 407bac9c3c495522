"""Whether our Triton ops serve on this device, found out before the first request."""

from __future__ import annotations

import logging

import torch
from dflash_kernels import dispatch
from dflash_kernels.self_test import OpError, self_test

from dflash_sglang.config import SETTINGS_FLAG, OpsChoice
from dflash_sglang.errors import OpsError

logger = logging.getLogger(__name__)


def prepare_ops(ops: str, device: torch.device | str, block_size: int, vocab_size: int) -> None:
    """Test the Triton ops, or switch to the torch references.

    Args:
        ops: the setting of that name.
        device: that will serve.
        block_size: of the server.
        vocab_size: of the verifier.

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
        seconds = self_test(device, block_size, vocab_size)
    except OpError as problem:
        raise OpsError(
            f"device op {problem}. Serve with torch only: {SETTINGS_FLAG} FILE with "
            f'{{"ops": "{OpsChoice.REFERENCE.value}"}}, and please report it.'
        ) from problem
    logger.info(
        "DFLASH device ops: Triton, self-test passed (%s).",
        ", ".join(f"{op} {1000 * took:.0f} ms" for op, took in seconds.items()),
    )
