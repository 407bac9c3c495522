"""What `--enable-deterministic-inference` needs where there is no Triton."""

from __future__ import annotations

from typing import Any

from dflash_kernels.accept_sampled.hashing import murmur_hash32

__all__ = ["murmur_hash32", "no_batch_invariant_kernels"]


def no_batch_invariant_kernels(model_runner: Any) -> None:
    """In place of `ModelRunner.maybe_enable_batch_invariant_mode`, which registers Triton matmuls.

    Torch's CPU matmuls may round differently at another batch size, in the last bits of a float32.
    """
