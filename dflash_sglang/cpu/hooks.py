"""The hooks on SGLang that no extension point covers, and the check that they are in place."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple

from dflash_kernels.accept_sampled.hashing import murmur_hash32
from sglang.srt.mem_cache.allocation import get_last_loc_torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

from dflash_sglang.cpu.attention.slots import assign_slots
from dflash_sglang.cpu.matmul.gemm import repack_weights
from dflash_sglang.errors import PlatformError

WEIGHT_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
SOURCE = HookSource(plugin_name="dflash_cpu", dist_name="dflash-sglang")


class Hook(NamedTuple):
    """One hook on one SGLang function."""

    target: str  # dotted path
    hook: Callable[..., Any]
    kind: HookType
    why: str


def keep_embedding_dtype(
    kwargs: dict[str, Any], runner: Any, forward_batch: Any, *_: Any, **__: Any
) -> dict[str, Any]:
    """Pass the drafter its embeddings in the model's dtype; SGLang casts them to bfloat16."""
    if forward_batch.input_embeds is not None and forward_batch.replace_embeds is None:
        kwargs["input_embeds"] = forward_batch.input_embeds.to(runner.dtype)
    return kwargs


def repack_after_update(result: Any, *_: Any, **__: Any) -> Any:
    """Pack the weights for oneDNN again after an update has changed them in place."""
    repack_weights()
    return result


def no_batch_invariant_kernels(model_runner: Any) -> None:
    """Replace ``ModelRunner.maybe_enable_batch_invariant_mode``, which registers Triton matmuls.

    Torch's CPU matmuls may round differently at another batch size, in the last bits of a float32.
    """


WEIGHT_UPDATES = (
    "update_weights_from_disk",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "load_weights_from_distributed",
)

HOOKS = (
    *(
        Hook(
            f"{WEIGHT_UPDATER}.{update}",
            repack_after_update,
            HookType.AFTER,
            "weights packed for oneDNN change in place",
        )
        for update in WEIGHT_UPDATES
    ),
    Hook(
        "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
        assign_slots,
        HookType.REPLACE,
        "speculative decoding assigns KV slots with a Triton kernel",
    ),
    Hook(
        "sglang.srt.mem_cache.allocation.get_last_loc",
        get_last_loc_torch,
        HookType.REPLACE,
        "page sizes above 1 look up the last slot in Triton, except for backend torch_native",
    ),
    Hook(
        "sglang.srt.model_executor.model_runner.ModelRunner._extend_forward_kwargs",
        keep_embedding_dtype,
        HookType.AFTER,
        "a float32 drafter gets bfloat16 embeddings",
    ),
    Hook(
        "sglang.kernels.ops.sampling.murmur_hash.murmur_hash32",
        murmur_hash32,
        HookType.REPLACE,
        "seeded sampling uses a hash kernel that the wheel lacks for CPUs",
    ),
    Hook(
        "sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode",
        no_batch_invariant_kernels,
        HookType.REPLACE,
        "--enable-deterministic-inference registers Triton matmuls",
    ),
)


def apply_hooks(hooks: tuple[Hook, ...] = HOOKS) -> None:
    """Apply the hooks and check that each is in place.

    Args:
        hooks: the hooks to apply.

    Raises:
        PlatformError: SGLang did not apply one. It only logs that, and would later launch a
            Triton kernel.
    """
    before = {hook.target: pkgutil.resolve_name(_colon(hook.target)) for hook in hooks}
    for hook in hooks:
        HookRegistry.register(hook.target, hook.hook, hook.kind, source=SOURCE)
    HookRegistry.apply_hooks()
    missing = [hook.target for hook in hooks if not is_applied(hook.target, before[hook.target])]
    if missing:
        raise PlatformError(
            f"SGLang did not apply the hook on {', '.join(missing)}; its log has the reason"
        )


def is_applied(target: str, original: Any) -> bool:
    """Whether a target is now a wrapper around the original.

    Args:
        target: dotted path of the target.
        original: the object at that path before.

    Returns:
        True when the object at that path is another one and its ``__wrapped__`` chain leads to the
        original.
    """
    current = pkgutil.resolve_name(_colon(target))
    while current is not original:
        inner = getattr(current, "__wrapped__", None)
        if inner is None:
            return False
        if inner is original:
            return True
        current = inner
    return False


def _colon(target: str) -> str:
    """Turn ``package.module.Class.attribute`` into ``package.module:Class.attribute``."""
    parts = target.split(".")
    in_class = (i for i, part in enumerate(parts) if part[:1].isupper())
    split = next(in_class, len(parts) - 1)
    return f"{'.'.join(parts[:split])}:{'.'.join(parts[split:])}"
