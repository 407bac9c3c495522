"""Server arguments that the platform fills in where the user gave none."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from dflash_sglang.cpu.activation import BACKEND

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

# What SGLang resolves the attention backend to on a CPU when the user names none.
STOCK_CPU_BACKENDS = (None, "intel_amx", "torch_native")

# SGLang turns float32 checkpoints into float16 under "auto". A CPU has no fast float16 arithmetic,
# so both are served in float32, which holds every value of either exactly. bfloat16 checkpoints
# stay bfloat16.
SERVED_IN_FLOAT32 = ("float32", "float16", "None")

# SGLang's default needs Triton; torch_native is the one that runs on a CPU.
STOCK_LORA_BACKEND, LORA_BACKEND = "csgmv", "torch_native"

CONV_DTYPE = "SGLANG_MAMBA_CONV_DTYPE"
RUNNING_REQUESTS = 24
# A running request holds its own recurrent state and two for the prefix cache; the rest hold the
# states of cached prefixes.
STATES_PER_REQUEST = 5
SPARE_STATES = 8


def apply_defaults(server_args: ServerArgs) -> None:
    """Fill in the attention backend, the dtype and the size of the pool of recurrent states.

    Args:
        server_args: the arguments being resolved; changed in place.
    """
    if server_args.attention_backend in STOCK_CPU_BACKENDS:
        server_args.attention_backend = BACKEND
    if server_args.lora_backend == STOCK_LORA_BACKEND:
        server_args.lora_backend = LORA_BACKEND
    config = _model_config(server_args)
    server_args.dtype = choose_dtype(server_args.dtype, config)
    _size_recurrent_pool(server_args, config)


def choose_dtype(requested: str, config: Any) -> str:
    """Value for ``--dtype``.

    Args:
        requested: the user's ``--dtype``.
        config: the checkpoint's configuration; only its dtype is read.

    Returns:
        The requested dtype; for ``auto`` the dtype of the checkpoint, with float32 for float16.
    """
    if requested != "auto":
        return requested
    stored = str(getattr(config, "dtype", None)).removeprefix("torch.")
    if stored not in SERVED_IN_FLOAT32:
        return "auto"
    logger.info("--dtype auto: the checkpoint's %s is served as float32 on this CPU", stored)
    return "float32"


def _size_recurrent_pool(server_args: ServerArgs, config: Any) -> None:
    """Size the pool of recurrent states, which SGLang would make a share of the machine's memory.

    The states of the convolutions, and with them what a verify records, are kept in float32:
    SGLang's bfloat16 would round what a float32 model computes.
    """
    from sglang.srt.configs.hybrid_arch import hybrid_gdn_config

    if hybrid_gdn_config(SimpleNamespace(hf_config=config)) is None:
        return
    os.environ.setdefault(CONV_DTYPE, "float32")
    if server_args.max_running_requests is None:
        server_args.max_running_requests = RUNNING_REQUESTS
    if server_args.max_mamba_cache_size is None:
        server_args.max_mamba_cache_size = (
            STATES_PER_REQUEST * server_args.max_running_requests + SPARE_STATES
        )


def _model_config(server_args: ServerArgs) -> Any:
    from sglang.srt.utils.hf_transformers.config import get_config

    return get_config(
        server_args.model_path,
        trust_remote_code=server_args.trust_remote_code,
        revision=server_args.revision,
    )
