"""A plugin for benchmarks: where the time of decode steps goes, in the scheduler of a real server.

Wraps the parts of a step in a clock and writes, every few steps, `{batch size: {part: [seconds]}}`
to the file that DFLASH_STEP_TIMES names. A step lasts from the beginning of one decode step's
forward pass to the beginning of the next; one with a prefill in between is left out.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

STEP_TIMES = "DFLASH_STEP_TIMES"
WRITE_EVERY = 100  # steps
PARTS = {
    "draft": "dflash_sglang.step.draft.drafter.Drafter.propose",
    "verify": "dflash_sglang.step.verify.Verifier.verify",
    "accept": "dflash_sglang.step.accept.Acceptor.accept",
    "context KV": "dflash_sglang.step.context_kv.ContextKV.append",
    "width": "dflash_sglang.step.width_control.WidthController.choose",
    "worker": "dflash_sglang.step.worker.DFlashWorker.forward_batch_generation",
    "plain": "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
}

_times: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
_parts: dict[str, float] = {}
_state: dict[str, Any] = {"begin": None, "batch_size": 0, "steps": 0}


def register() -> None:
    """Entry point: in the scheduler, once its worker is known."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.init_model_worker", hook_parts, HookType.AFTER
    )


def hook_parts(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap the parts, and the step."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    speculative = scheduler.draft_worker is not None
    for part, target in PARTS.items():
        if speculative != (part == "plain"):
            step = part in ("worker", "plain")
            around = functools.partial(_step if step else _part, part)
            HookRegistry.register(target, around, HookType.AROUND)
    HookRegistry.apply_hooks()
    return result


def _part(name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
    begin = time.perf_counter()
    result = original(*args, **kwargs)
    _parts[name] = _parts.get(name, 0.0) + time.perf_counter() - begin
    return result


def _step(name: str, original: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    now = time.perf_counter()
    if _state["begin"] is not None:
        _finish(now - _state["begin"])
    _parts.clear()
    decode = batch is not None and batch.forward_mode.is_decode()
    _state["begin"] = now if decode else None
    _state["batch_size"] = len(batch.reqs) if decode else 0
    return _part(name, original, worker, batch, *args, **kwargs)


def _finish(seconds: float) -> None:
    cell = _times[_state["batch_size"]]
    cell["step"].append(seconds)
    for part, took in _parts.items():
        cell[part].append(took)
    _state["steps"] += 1
    if _state["steps"] % WRITE_EVERY == 0:
        Path(os.environ[STEP_TIMES]).write_text(json.dumps(_times))
