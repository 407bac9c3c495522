"""The platform class SGLang instantiates on a machine without an accelerator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import KVPoolKind, PlatformCapabilities, SRTPlatform

from dflash_sglang.cpu.activation import BACKEND

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.server_args import ServerArgs

DISPATCH_KEY = "dflash_cpu"  # under which our forwards are registered with SGLang's fused ops


class CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Torch everywhere: no Triton, no graphs, no streams."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_device(self, device_id: int = 0) -> str:
        """The device string; one device for all ranks."""
        return "cpu"  # the mixin's torch.device fails where SGLang splits the string

    # ---- configuration -------------------------------------------------------------------------

    def apply_server_args_defaults(self, server_args: ServerArgs) -> None:
        """Fill in the attention backend, the dtype and the size of the recurrent state pool."""
        from dflash_sglang.cpu.server_args import apply_defaults

        apply_defaults(server_args)

    def get_default_attention_backend(self) -> str:
        """Name of the attention backend."""
        return BACKEND

    # ---- speculative decoding ------------------------------------------------------------------

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        """Whether the algorithm can be selected: DFLASH only."""
        return algorithm == "DFLASH"

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        """Name of the drafter's attention backend."""
        return BACKEND

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        """Whether a drafter may use the backend: only ours has non-causal blocks."""
        return backend == BACKEND

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor]:
        """The look-up of a block's KV slots, in torch."""
        from dflash_sglang.cpu.attention.slots import block_slots

        return block_slots

    def get_speculative_worker_cls(self, algorithm: str) -> type | None:
        """SGLang's own DFLASH worker without streams, for draft heads that ours does not serve."""
        if algorithm != "DFLASH":
            return None
        from dflash_sglang.cpu.builtin_worker import CpuBuiltinDFlashWorker

        return CpuBuiltinDFlashWorker

    # ---- memory and ops ------------------------------------------------------------------------

    def get_kv_pool_cls(self, *, kind: KVPoolKind) -> type | None:
        """The pool class for multi-head attention; other kinds are left to SGLang."""
        if kind != "mha":
            return None
        from dflash_sglang.cpu.attention.kv_pool import CpuKVPool

        return CpuKVPool

    def support_mamba_cache_extra_buffer(self) -> bool:
        """Whether recurrent states can be kept for the prefix cache: yes."""
        return True

    def get_dispatch_key_name(self) -> str:
        """Key under which ``ops`` registers forwards; other ops take their native form."""
        return DISPATCH_KEY

    def get_compile_backend(self, mode: str | None = None) -> str:
        """No compilation: it would need a C++ compiler on the user's machine."""
        return "eager"

    def get_torch_profiler_activity_str(self) -> str:
        """Name of the activity that SGLang's profiler end point records."""
        return "CPU"

    def get_torch_profiler_activity(self) -> Any:
        """The activity that SGLang's profiler end point records."""
        return torch.profiler.ProfilerActivity.CPU

    # ---- the scheduler process -----------------------------------------------------------------

    def post_load_model(self, model: torch.nn.Module) -> None:
        """Called in the scheduler process, once per model: the verifier, then the drafter.

        Everything that touches SGLang's serving code happens here and not at import, so that the
        tokenizer, the detokenizer and the launcher do not load it.
        """
        from dflash_sglang.cpu.prepare import prepare_model, prepare_process

        prepare_process(DISPATCH_KEY)
        prepare_model(model)
