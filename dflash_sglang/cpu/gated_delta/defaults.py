"""Defaults for models with recurrent layers."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

CONV_DTYPE = "SGLANG_MAMBA_CONV_DTYPE"
RUNNING_REQUESTS = 24
# A running request holds one state and two for the prefix cache; the rest are cached prefixes'.
STATES_A_REQUEST = 5
SPARE_STATES = 8


def recurrent_defaults(server_args: ServerArgs) -> None:
    """Size the pool of states, which SGLang would make a share of the machine's memory.

    The convolutions' states, and with them the records of a verify, are kept in float32: SGLang's
    bfloat16 would round what a float32 model computes.

    Args:
        server_args: the arguments in resolution, changed in place for a model with such layers.
    """
    from sglang.srt.configs.hybrid_arch import hybrid_gdn_config
    from sglang.srt.utils.hf_transformers.config import get_config

    config = get_config(
        server_args.model_path,
        trust_remote_code=server_args.trust_remote_code,
        revision=server_args.revision,
    )
    if hybrid_gdn_config(SimpleNamespace(hf_config=config)) is None:
        return
    os.environ.setdefault(CONV_DTYPE, "float32")
    if server_args.max_running_requests is None:
        server_args.max_running_requests = RUNNING_REQUESTS
    if server_args.max_mamba_cache_size is None:
        server_args.max_mamba_cache_size = (
            STATES_A_REQUEST * server_args.max_running_requests + SPARE_STATES
        )
