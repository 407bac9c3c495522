"""SGLang's own DFLASH worker on a device without streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from torch import Tensor
from torch._C import _disabled_torch_function_impl

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


class StreamlessTensor(Tensor):
    """A view of a CPU tensor that accepts ``record_stream``, which torch lacks on a CPU."""

    # operations on it return ordinary tensors
    __torch_function__ = _disabled_torch_function_impl  # type: ignore[assignment]

    def record_stream(self, stream: Any) -> None:
        """Nothing to record: work on a CPU is finished when the call returns."""


class CpuBuiltinDFlashWorker(DFlashWorkerV2):
    """SGLang's own worker; its step calls ``record_stream`` on the sequence lengths."""

    def forward_batch_generation(self, batch: ScheduleBatch, *args: Any, **kwargs: Any) -> Any:
        """One step of SGLang's worker, on lengths that accept ``record_stream``."""
        if batch.seq_lens is not None:
            batch.seq_lens = batch.seq_lens.as_subclass(StreamlessTensor)
        return super().forward_batch_generation(batch, *args, **kwargs)
