"""The dtype a checkpoint is served in when the user names none."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

# SGLang turns float32 checkpoints into float16 under "auto". A CPU has no float16 arithmetic to
# gain from it, so both are served in float32, which holds every value of either exactly. bfloat16
# checkpoints stay bfloat16.
SERVED_IN_FLOAT32 = ("float32", "float16", "None")


def dtype_default(server_args: ServerArgs) -> str:
    """Value for ``--dtype``.

    Args:
        server_args: the resolved arguments; only the model's location and the dtype are read.

    Returns:
        What the user asked for, or for ``auto`` the dtype of the checkpoint, float16 excepted.
    """
    if server_args.dtype != "auto":
        return server_args.dtype
    from sglang.srt.utils.hf_transformers.config import get_config

    config = get_config(
        server_args.model_path,
        trust_remote_code=server_args.trust_remote_code,
        revision=server_args.revision,
    )
    stored = str(getattr(config, "dtype", None)).removeprefix("torch.")
    if stored not in SERVED_IN_FLOAT32:
        return "auto"
    logger.info("--dtype auto: the checkpoint's %s is served as float32 on this CPU", stored)
    return "float32"
